// Compact weights, written: packed tiles of bfloat16 to panels of `compact_order.h`, once at load, and back.
// Compiled for any x86-64. Which weights are kept so is decided in `packing.py`.
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <atomic>

#include "compact_order.h"
#include "pool.h"

namespace {

// Of an exponent only the upper seven bits are looked at.
enum { EXPONENTS = 128, CHOSEN = COMMON / 2, NO_PLACE = 255 };

int exponent_of(uint16_t word) { return word >> 8 & 0x7f; }

// How often each is among the numbers. Several counts side by side: of equal numbers one would wait for the other.
void count_exponents(const uint16_t* words, long length, uint32_t* out) {
  uint32_t counts[4][EXPONENTS] = {};
  for (long i = 0; i < length; i += 4)
    for (int j = 0; j < 4; j++) counts[j][exponent_of(words[i + j])]++;
  for (int e = 0; e < EXPONENTS; e++) out[e] = counts[0][e] + counts[1][e] + counts[2][e] + counts[3][e];
}

// The high bytes that are there most often, first without and then with a sign; and where each exponent is among them.
void choose_high_bytes(const uint16_t* words, long length, uint8_t* high_bytes, uint8_t* place) {
  uint32_t counts[EXPONENTS];
  count_exponents(words, length, counts);
  uint8_t order[EXPONENTS];
  for (int e = 0; e < EXPONENTS; e++) order[e] = (uint8_t)e, place[e] = NO_PLACE;
  std::stable_sort(order, order + EXPONENTS, [&](int a, int b) { return counts[a] > counts[b]; });
  for (int i = 0; i < CHOSEN; i++) {
    high_bytes[i] = order[i], high_bytes[CHOSEN + i] = order[i] | 0x80;
    place[order[i]] = (uint8_t)i;
  }
}

void write_block(const uint16_t* words, const uint8_t* place, uint8_t* block) {
  auto place_of = [&](uint16_t word) { return (place[exponent_of(word)] & (CHOSEN - 1)) | (word >> 15) * CHOSEN; };
  for (int p = 0; p < BLOCK; p++) {
    uint16_t first = words[word_of_byte(p)], second = words[BLOCK + word_of_byte(p)];
    block[p] = (uint8_t)(place_of(first) | place_of(second) << 4);
    block[BLOCK + p] = (uint8_t)first, block[2 * BLOCK + p] = (uint8_t)second;
  }
}

// Lists the rare numbers of a tile from `at` on, and returns where they end; null: there is no room.
Rare* list_rare(const uint16_t* words, const uint8_t* place, Rare* at, const Rare* end) {
  for (int i = 0; i < TILE; i++) {
    if (place[exponent_of(words[i])] != NO_PLACE) continue;
    if (at == end) return nullptr;
    *at++ = {(uint16_t)i, (uint16_t)(words[i] >> 8)};
  }
  return at;
}

// A panel; false: it has too many rare numbers.
bool write_panel(const uint16_t* words, int tiles, char* out) {
  const CompactPanel panel = {out, tiles};
  uint8_t place[EXPONENTS];
  choose_high_bytes(words, (long)tiles * TILE, (uint8_t*)panel.high_bytes(), place);
  uint16_t* starts = (uint16_t*)panel.starts();
  Rare *first = (Rare*)panel.rare(), *at = first, *end = first + std::min(65535, tiles * RARE_PER_TILE);
  for (int i = 0; i < tiles; i++, words += TILE) {
    starts[i] = (uint16_t)(at - first);
    at = list_rare(words, place, at, end);
    if (!at) return false;
    for (int b = 0; b < TILE_BLOCKS; b++)
      write_block(words + b * 2 * BLOCK, place, (uint8_t*)panel.tile(i) + b * BLOCK_BYTES);
  }
  starts[tiles] = (uint16_t)(at - first);
  return true;
}

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
  std::atomic<int>* misfits;
};

void write_all(const void* argument, holdfast::Run& run) {
  const Job job = *(const Job*)argument;
  holdfast::tasks(run, (int)job.panels, [&](int i) {
    if (!write_panel(job.words + (long)i * job.tiles * TILE, job.tiles, job.compact + i * bytes_of(job.tiles)))
      (*job.misfits)++;
  });
}

void read_all(const void* argument, holdfast::Run& run) {
  const Job job = *(const Job*)argument;
  holdfast::tasks(run, (int)job.panels, [&](int i) {
    read_panel({job.compact + i * bytes_of(job.tiles), job.tiles}, job.words + (long)i * job.tiles * TILE);
  });
}

}  // namespace

// Bytes of a panel of so many tiles of 16 outputs.
extern "C" long native_compact_bytes(int tiles) { return bytes_of(tiles); }

// Panels of packed tiles to compact ones. 1: a panel has too many rare numbers, and what is in `out` is of no use;
// otherwise what `holdfast::run` says.
extern "C" int native_compact(holdfast::Pool* pool, uint16_t* words, long panels, int tiles, char* out) {
  std::atomic<int> misfits{0};
  Job job = {words, out, panels, tiles, &misfits};
  int outcome = holdfast::run(pool, write_all, &job);
  return outcome ? outcome : misfits > 0;
}

// Compact panels as packed tiles again.
extern "C" int native_expand(holdfast::Pool* pool, char* compact, long panels, int tiles, uint16_t* out) {
  Job job = {out, compact, panels, tiles, nullptr};
  return holdfast::run(pool, read_all, &job);
}
