// Products by the tile unit: rows of bfloat16 times tiles of 32 inputs and 16 outputs, for any number of rows.
// In which order a tile's products are added stands in `tiles.h`; products by FMA are in `fma.h`.
#pragma once
#include <algorithm>

#include "fma.h"
#include "tiles.h"

namespace {

enum { BLOCK_ROWS = 32 };
#ifdef NATIVE_TILES
// Of two tiles of weights: cache lines; and how many k tiles of them are summed at once (a panel of 32 columns).
enum { LINES = 32, WHOLE_TILES = 32, CUT_TILES = 20 };

NATIVE_INLINE void prefetch_tile(const Bf16* tile) {
  for (int i = 0; i < 1024; i += 64) _mm_prefetch((const char*)tile + PREFETCH_BYTES + i, _MM_HINT_T0);
}

// Up to 16 rows and 64 columns: four accumulators side by side.
NATIVE_INLINE void tiles_1x4(Tiles& t, const Bf16* rows, long stride, const Bf16* w, int k_tiles, int first, int end,
                             float* sums) {
  const Bf16 *left = w + (long)first * 2 * TILE, *right = left + (long)k_tiles * 2 * TILE;
  tile_zero<0>(t), tile_zero<1>(t), tile_zero<2>(t), tile_zero<3>(t);
  for (int k = first; k < end; k++, left += 2 * TILE, right += 2 * TILE) {
    tile_load<4>(t, rows + k * K_TILE, stride * 2);
    prefetch_tile(left), tile_load<6>(t, left, 64), tile_product<0, 4, 6>(t);
    prefetch_tile(left + TILE), tile_load<7>(t, left + TILE, 64), tile_product<1, 4, 7>(t);
    prefetch_tile(right), tile_load<6>(t, right, 64), tile_product<2, 4, 6>(t);
    prefetch_tile(right + TILE), tile_load<7>(t, right + TILE, 64), tile_product<3, 4, 7>(t);
  }
  tile_store<0>(t, sums, GROUP * 4), tile_store<1>(t, sums + 16, GROUP * 4);
  tile_store<2>(t, sums + 32, GROUP * 4), tile_store<3>(t, sums + 48, GROUP * 4);
}

// What comes after a panel: fetched into the second cache while the rows pass, some lines with each k tile.
struct Ahead {
  const Bf16* panel;  // or null
  int lines;
};
NATIVE_INLINE void fetch(Ahead ahead, int tile) {
  const char* at = (const char*)(ahead.panel + (long)tile * 2 * TILE);
  for (int i = 0; i < ahead.lines; i++) _mm_prefetch(at + i * 64, _MM_HINT_T1);
}

// 17 to 32 rows and 32 columns: two by two accumulators, which go on from `sums` if they have begun.
template <bool FAR>
NATIVE_INLINE void tiles_2x2(Tiles& t, const Bf16* rows, long stride, const Bf16* w, int first, int end, float* sums,
                             bool begun, Ahead ahead) {
  float* lower = sums + 16 * GROUP;
  if (begun) {
    tile_load<0>(t, sums, GROUP * 4), tile_load<1>(t, sums + 16, GROUP * 4);
    tile_load<2>(t, lower, GROUP * 4), tile_load<3>(t, lower + 16, GROUP * 4);
  } else tile_zero<0>(t), tile_zero<1>(t), tile_zero<2>(t), tile_zero<3>(t);
  for (int k = first; k < end; k++) {
    const Bf16* tile = w + (long)k * 2 * TILE;
    if (FAR) prefetch_tile(tile);
    else fetch(ahead, k - first);
    tile_load<6>(t, tile, 64), tile_load<4>(t, rows + k * K_TILE, stride * 2), tile_load<7>(t, tile + TILE, 64);
    tile_product<0, 4, 6>(t);
    if (FAR) prefetch_tile(tile + TILE);
    tile_load<5>(t, rows + 16 * stride + k * K_TILE, stride * 2);
    tile_product<1, 4, 7>(t), tile_product<2, 5, 6>(t), tile_product<3, 5, 7>(t);
  }
  tile_store<0>(t, sums, GROUP * 4), tile_store<1>(t, sums + 16, GROUP * 4);
  tile_store<2>(t, lower, GROUP * 4), tile_store<3>(t, lower + 16, GROUP * 4);
}

// Up to 16 rows and 32 columns.
NATIVE_INLINE void tiles_1x2(Tiles& t, const Bf16* rows, long stride, const Bf16* w, int first, int end, float* sums,
                             bool begun) {
  if (begun) tile_load<0>(t, sums, GROUP * 4), tile_load<1>(t, sums + 16, GROUP * 4);
  else tile_zero<0>(t), tile_zero<1>(t);
  for (int k = first; k < end; k++) {
    const Bf16* tile = w + (long)k * 2 * TILE;
    tile_load<4>(t, rows + k * K_TILE, stride * 2);
    tile_load<6>(t, tile, 64), tile_product<0, 4, 6>(t);
    tile_load<7>(t, tile + TILE, 64), tile_product<1, 4, 7>(t);
  }
  tile_store<0>(t, sums, GROUP * 4), tile_store<1>(t, sums + 16, GROUP * 4);
}

// All rows by 32 columns: a panel of weights stays in the cache while the rows pass.
NATIVE_INLINE void pass_rows(Tiles& t, const Bf16* rows, long stride, int count, const Bf16* panel, int first, int end,
                             float* sums, bool begun, const Bf16* next) {
  int blocks = (count + BLOCK_ROWS - 1) / BLOCK_ROWS, line = 0;
  for (int r = 0; r < count; r += BLOCK_ROWS) {
    int left = count - r < BLOCK_ROWS ? count - r : BLOCK_ROWS;
    const Bf16* block = rows + r * stride;
    shape_tiles(t, left < 16 ? left : 16, left > 16 ? left - 16 : 16);
    int until = r && next ? LINES * (r / BLOCK_ROWS) / (blocks - 1) : 0;  // the first block waits for its own weights
    Ahead ahead = {next + line * 32, until - line};
    line = until;
    if (left <= 16) tiles_1x2(t, block, stride, panel, first, end, sums + r * GROUP, begun);
    else if (r == 0) tiles_2x2<true>(t, block, stride, panel, first, end, sums, begun, ahead);
    else tiles_2x2<false>(t, block, stride, panel, first, end, sums + r * GROUP, begun, ahead);
  }
}

// Any number of rows. Many k tiles are cut, so that a panel of 32 columns stays in the first cache: the accumulators are
// stored and loaded between, which changes no bit. `after`: the weights that come next, or null.
void tile_rows(Tiles& t, const Bf16* rows, long stride, int count, const Bf16* w, int k_tiles, int first, int end,
               float* sums, const Bf16* after) {
  if (count <= 16) {
    shape_tiles(t, count, count);
    tiles_1x4(t, rows, stride, w, k_tiles, first, end, sums);
    return;
  }
  const long panel = (long)k_tiles * 2 * TILE;
  int pieces = count <= BLOCK_ROWS || end - first <= WHOLE_TILES ? 1 : (end - first + CUT_TILES - 1) / CUT_TILES;
  for (int i = 0, from = first; i < pieces; i++) {
    int to = first + (int)((long)(end - first) * (i + 1) / pieces);
    for (int half = 0; half < 2; half++) {
      const Bf16* next = half == 0 ? w + panel + (long)from * 2 * TILE : to < end ? w + (long)to * 2 * TILE : after;
      pass_rows(t, rows, stride, count, w + half * panel, from, to, sums + half * 32, i > 0, next);
    }
    from = to;
  }
}
#endif

}  // namespace
