// Copies of blocks out of a cache and into it. A row of bytes holds a block's layers one after the other.
#include <stdint.h>
#include <string.h>

#include <algorithm>

namespace {

enum { LINE = 64, AT_ONCE = 8 * LINE };

struct LayerBlocks {
  uint8_t* blocks;  // of one layer, one after the other
  int64_t bytes;    // of a block
};

struct Copy {
  const uint8_t* from;
  uint8_t* to;
  int64_t bytes;
};

// Copies, and meanwhile fetches what is copied next: it lies elsewhere, so no core foresees it.
void copy_and_fetch(const Copy& copy, const Copy& next) {
  for (int64_t at = 0; at < copy.bytes; at += AT_ONCE) {
    const int64_t end = std::min<int64_t>(at + AT_ONCE, next.bytes);
    for (int64_t line = at; line < end; line += LINE) __builtin_prefetch(next.from + line);
    memcpy(copy.to + at, copy.from + at, std::min<int64_t>(AT_ONCE, copy.bytes - at));
  }
}

}  // namespace

// Rows and blocks lie at these addresses and have these numbers; `to_rows`: else from them.
extern "C" void native_copy_blocks(int to_rows, int num_layers, const LayerBlocks* layers, long count,
                                   const int64_t* block_ids, uint8_t* const* rows) {
  Copy last = {nullptr, nullptr, 0};
  for (long i = 0; i < count; i++) {
    uint8_t* row = rows[i];
    for (int k = 0; k < num_layers; k++) {
      uint8_t* block = layers[k].blocks + block_ids[i] * layers[k].bytes;
      const Copy copy = {to_rows ? block : row, to_rows ? row : block, layers[k].bytes};
      copy_and_fetch(last, copy);
      last = copy;
      row += layers[k].bytes;
    }
  }
  copy_and_fetch(last, {nullptr, nullptr, 0});
}
