// Compact weights: bfloat16 numbers in about 12 bits each, without loss. Where their parts lie.
//
// The numbers of a weight have few exponents: sixteen of them are those of all but one in ten thousand. A number is kept as
// its sign and mantissa in a byte, and as the place of its exponent among the sixteen in half a byte. The exponents of the
// others are listed before the panel's tiles. (That trained weights are like this is known: "DFloat11", arXiv:2504.11651.)
// Plain C++: `compact.cpp` is compiled for any x86-64. Reading a tile is in `compact.h`.
#pragma once
#include <stdint.h>

#include "tile_order.h"

namespace {

// A tile's blocks are of 128 numbers: [64 pairs of places][64 of the first half's bytes][64 of the second half's].
enum { BLOCK = 64, BLOCK_BYTES = 3 * BLOCK, TILE_BLOCKS = TILE / (2 * BLOCK), COMPACT_TILE = TILE_BLOCKS * BLOCK_BYTES };
enum { COMMON = 16 };        // exponents that have a place
enum { RARE_PER_TILE = 2 };  // room for others; a weight that has more of them in any panel stays as it is

// A number whose exponent has no place.
struct Rare {
  uint16_t at, exponent;  // in its tile
};

// Where in its half a number lies whose byte is at `p`: registers are made by interleaving low and high bytes in lanes of 16.
inline int word_of_byte(int p) { return p % 16 / 8 * 32 + p / 16 * 8 + p % 8; }

// A panel, 32 outputs: [16 exponents][where each tile's rare numbers begin, and the end][rare numbers][tiles].
struct CompactPanel {
  const char* at;
  int tiles;  // of 16 outputs
  long before_rare() const { return (COMMON + (tiles + 1) * 2L + 3) / 4 * 4; }
  long before_tiles() const { return (before_rare() + tiles * (long)(RARE_PER_TILE * sizeof(Rare)) + 63) / 64 * 64; }
  long bytes() const { return before_tiles() + tiles * (long)COMPACT_TILE; }
  const uint8_t* exponents() const { return (const uint8_t*)at; }
  const uint16_t* starts() const { return (const uint16_t*)(at + COMMON); }
  const Rare* rare() const { return (const Rare*)(at + before_rare()); }
  const uint8_t* tile(int i) const { return (const uint8_t*)at + before_tiles() + (long)i * COMPACT_TILE; }
};

}  // namespace
