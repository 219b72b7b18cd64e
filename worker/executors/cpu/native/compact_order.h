// Compact weights: bfloat16 numbers in about 12 bits each, without loss. Where their parts lie.
//
// The numbers of a weight have few exponents. Of a number's two bytes the low one is kept as it is: the exponent's last bit
// and the mantissa. The high one has the sign and the exponent's upper seven bits; eight of those bits' values are those of
// all but one number in five thousand. So half a byte says which of sixteen high bytes it is, and others are listed before
// the panel's tiles. (That trained weights have few exponents is known: "DFloat11", arXiv:2504.11651.)
// Plain C++. Writing a panel is in `compact_write.h`, reading a tile in `compact.h`.
#pragma once
#include <stdint.h>

#include "aside.h"
#include "tile_order.h"

namespace {

// A tile's blocks are of 128 numbers: [64 pairs of places][64 of the first half's low bytes][64 of the second half's].
enum {
  BLOCK = 64,
  BLOCK_BYTES = 3 * BLOCK,
  TILE_BLOCKS = TILE / (2 * BLOCK),
  COMPACT_TILE = TILE_BLOCKS * BLOCK_BYTES
};
enum { COMMON = 16 };        // high bytes that have a place: eight, and the same with a sign
enum { RARE_PER_TILE = 2 };  // room for others; a weight that has more of them in any panel stays as it is

// A number whose high byte has no place.
struct Rare {
  uint16_t at, high;  // `at`: in its tile
};

// Where in its half a number lies whose byte is at `p`: registers are made by interleaving low and high bytes in lanes of 16.
inline int word_of_byte(int p) { return p % 16 / 8 * 32 + p / 16 * 8 + p % 8; }

// A panel, 32 outputs: [16 high bytes][where each tile's rare numbers begin, and the end][rare numbers][tiles].
struct CompactPanel {
  const char* at;
  int tiles;  // of 16 outputs
  long before_rare() const { return (COMMON + (tiles + 1) * 2L + 3) / 4 * 4; }
  long before_tiles() const { return (before_rare() + tiles * (long)(RARE_PER_TILE * sizeof(Rare)) + 63) / 64 * 64; }
  long bytes() const { return before_tiles() + tiles * (long)COMPACT_TILE; }
  const uint8_t* high_bytes() const { return (const uint8_t*)at; }
  const uint16_t* starts() const { return (const uint16_t*)(at + COMMON); }
  const Rare* rare() const { return (const Rare*)(at + before_rare()); }
  const uint8_t* tile(int i) const { return (const uint8_t*)at + before_tiles() + (long)i * COMPACT_TILE; }
};

enum { BOTH_TILES = 2 * COMPACT_TILE };  // bytes of a panel's next 32 inputs

// Some k tiles of a panel, and those that are multiplied next, whose first one is `next_first` of `next` (`at` null: none).
struct CompactRun {
  CompactPanel panel;
  int first, end;
  CompactPanel next;
  int next_first;
  Aside* aside = nullptr;  // fetched meanwhile, so many lines with each k tile; or null
  int aside_lines = 0;
  const uint8_t* at(int k) const { return panel.tile(2 * k); }
  // What comes `by` k tiles after this one; of what is not known, the last that is.
  const uint8_t* later(int k, int by) const {
    k += by;
    return k < end ? at(k) : next.at ? next.tile(2 * (next_first + k - end)) : at(end - 1);
  }
  // What stands before the tiles of the next panel, a line with each k tile: all at once, some would be left out.
  const char* next_head(int k) const {
    const long line = (k - first) * 64L;
    return next.at && line < next.before_tiles() ? next.at + line : panel.at;
  }
};

}  // namespace
