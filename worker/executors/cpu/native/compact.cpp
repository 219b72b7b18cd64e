// Compact weights as packed tiles again, where a weight is not kept compact after all. `packing.cpp` writes them.
#include <stdint.h>

#include "compact_order.h"
#include "pool.h"

namespace {

void read_panel(const CompactPanel& panel, uint16_t* out) {
  for (int i = 0; i < panel.tiles; i++, out += TILE) {
    for (int b = 0; b < TILE_BLOCKS; b++) {
      const uint8_t* block = panel.tile(i) + b * BLOCK_BYTES;
      for (int p = 0; p < 2 * BLOCK; p++) {
        const int half = p / BLOCK, places = block[p % BLOCK];
        out[b * 2 * BLOCK + half * BLOCK + word_of_byte(p % BLOCK)] =
            (uint16_t)(panel.high_bytes()[half ? places >> 4 : places & 0xf] << 8 | block[BLOCK + p]);
      }
    }
    for (int n = panel.starts()[i]; n < panel.starts()[i + 1]; n++) {
      const Rare rare = panel.rare()[n];
      out[rare.at] = (uint16_t)((out[rare.at] & 0xff) | rare.high << 8);
    }
  }
}

long bytes_of(int tiles) { return CompactPanel{nullptr, tiles}.bytes(); }

struct Job {
  uint16_t* words;  // [panels][tiles][512]
  char* compact;    // [panels]
  long panels;
  int tiles;
};

void read_all(const void* argument, holdfast::Run& run) {
  const Job job = *(const Job*)argument;
  holdfast::tasks(run, (int)job.panels, [&](int i) {
    read_panel({job.compact + i * bytes_of(job.tiles), job.tiles}, job.words + (long)i * job.tiles * TILE);
  });
}

}  // namespace

// Bytes of a panel of so many tiles of 16 outputs.
extern "C" long native_compact_bytes(int tiles) { return bytes_of(tiles); }

// Compact panels as packed tiles again.
extern "C" int native_expand(holdfast::Pool* pool, char* compact, long panels, int tiles, uint16_t* out) {
  Job job = {out, compact, panels, tiles};
  return holdfast::run(pool, read_all, &job);
}
