// Products of many rows with compact weights, which are read into the first cache a k tile before they are multiplied.
//
// Reading and multiplying use different units of a core. So while a block of rows passes two tiles, some of the next two are
// read, and some behind those are fetched from memory: the three go on at the same time, and none in bursts. Only where
// tiles are factors as they lie; where they are widened, or go to the tile unit, pieces of a panel are read (`linear.h`).
#pragma once
#include "compact_rows.h"

namespace {

enum { STREAM_ROWS = 4, BLOCKS_OF_BOTH = 2 * TILE_BLOCKS };

// The blocks of a k tile that are left to read, and what is fetched meanwhile.
struct Reading {
  const uint8_t *from, *end, *later;
  Bf16* to;
  NATIVE_INLINE_MEMBER void some(const HighBytes& high_bytes, int blocks) {
    for (; blocks && from < end; blocks--, from += BLOCK_BYTES, later += BLOCK_BYTES, to += 2 * BLOCK)
      fetch_block(later), read_block(high_bytes, from, to);
  }
};
NATIVE_INLINE Reading reading(const CompactRun& run, int k, Bf16* to) {
  return {run.at(k), run.at(k) + (k < run.end ? BOTH_TILES : 0), run.later(k, TILES_AHEAD), to};
}
NATIVE_INLINE void finish(const CompactRun& run, const HighBytes& high_bytes, int k, Reading rest, Bf16* tiles) {
  rest.some(high_bytes, BLOCKS_OF_BOTH);
  for (int c = 0; c < 2 && k < run.end; c++)
    if (__builtin_expect(has_rare(run.panel, 2 * k + c), 0)) add_rare(run.panel, 2 * k + c, tiles + c * TILE);
}

// out [R][32] += rows [R][32] times both tiles.
template <int R, class F>
NATIVE_INLINE void add_rows(const F* rows, long stride, const Bf16* tiles, float* out, long out_stride) {
  if constexpr (R == STREAM_ROWS && has_block_4x2<F>) add_block_4x2(rows, stride, tiles, tiles + TILE, out, out_stride);
  else {
    const int C = 32 / WIDTH < FMA_COLUMNS ? 32 / WIDTH : FMA_COLUMNS;
    for (int c = 0; c < 32; c += C * WIDTH) {
      Columns<Bf16, columns_in<C>()> columns;
      for (int i = 0; i < columns_in<C>(); i++) columns.first[i] = tiles + (c / 16 + i) * TILE;
      columns.step = 2 * TILE;
      add_both<R, C, 0>(rows, stride, columns, 1, out + c, out_stride, true, {});
    }
  }
}

// out [count][32] = rows [count] times k tiles of a panel. `room`: for four tiles.
// `ASIDE`: the run fetches something aside.
template <bool ASIDE, class F>
__attribute__((noinline)) void stream_rows(const F* rows, long stride, int count, const CompactRun& run, Bf16* room,
                                           float* out, long out_stride) {
  const HighBytes high_bytes(run.panel);
  const int blocks = count / STREAM_ROWS, left = count % STREAM_ROWS;
  const int passes = blocks + (left > 0), each = (BLOCKS_OF_BOTH + passes - 1) / passes;
  for (int r = 0; r < count; r++)
    for (int c = 0; c < PANEL; c += WIDTH) wide_store(out + r * out_stride + c, wide_zero());
  Bf16 *tiles = room, *coming = room + 2 * TILE;
  finish(run, high_bytes, run.first, reading(run, run.first, tiles), tiles);
  for (int k = run.first; k < run.end; k++) {
    Reading next = reading(run, k + 1, coming);
    _mm_prefetch(run.next_head(k), _MM_HINT_T0);
    if (ASIDE) run.aside->some(run.aside_lines);
    const F* row = rows + (long)k * Factors<F>::PER_TILE;
    float* sums = out;
    for (int b = 0; b < blocks; b++, row += STREAM_ROWS * stride, sums += STREAM_ROWS * out_stride) {
      add_rows<STREAM_ROWS>(row, stride, tiles, sums, out_stride);
      next.some(high_bytes, each);
    }
    if (left == 3) add_rows<3>(row, stride, tiles, sums, out_stride);
    else if (left == 2) add_rows<2>(row, stride, tiles, sums, out_stride);
    else if (left == 1) add_rows<1>(row, stride, tiles, sums, out_stride);
    finish(run, high_bytes, k + 1, next, coming);
    std::swap(tiles, coming);
  }
}

}  // namespace
