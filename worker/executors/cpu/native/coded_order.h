// Weights in codes of eight bits: where their parts lie. Plain C++; reading a tile is in `coded_tiles.h`.
#pragma once
#include <stdint.h>

#include "tile_order.h"

namespace {

enum { CODED_OUTPUTS = 32, SCALE_FACTOR = 256, LINES_OF_TILE = 16, LINE_OF_TILE = 32 };

// A panel, 32 outputs: [runs of k tiles][32 scales, times SCALE_FACTOR][k tiles][two tiles of 16 outputs][512 codes]. Codes
// lie in the order of the numbers that they stand for.
struct CodedPanel {
  const char* at;
  int k_tiles, run;  // k tiles; those that share scales
  int runs() const { return (k_tiles + run - 1) / run; }
  long before_tiles() const { return runs() * (long)(CODED_OUTPUTS * sizeof(float)); }
  long bytes() const { return before_tiles() + k_tiles * 2L * TILE; }
  const float* scales(int k) const { return (const float*)at + k / run * CODED_OUTPUTS; }
  const uint8_t* tile(int i) const { return (const uint8_t*)at + before_tiles() + (long)i * TILE; }
};

// A line of a tile has two inputs of 16 outputs in turns: the first one of line `line`, and the second.
#ifdef NATIVE_PAIRS
inline int first_input(int line) { return line / 2 * 4 + line % 2 + 2; }
inline int second_input(int line) { return line / 2 * 4 + line % 2; }
#else
inline int first_input(int line) { return line * 2; }
inline int second_input(int line) { return line * 2 + 1; }
#endif

}  // namespace
