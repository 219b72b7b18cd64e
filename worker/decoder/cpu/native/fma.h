// Products by fused multiply-add, in the order of the tile unit: rows in float32 times tiles of 32 inputs and 16 outputs.
//
// A tile's even inputs are summed from +0, then its odd ones, and the two are added: one after the other, so that registers
// hold as many rows as they can. Where tiles come from, and in which order they are added, does not live here.
#pragma once
#include <type_traits>

#include "lanes.h"

namespace {

enum { TILE = 512, K_TILE = 32, PANEL = 32, GROUP = 64 };
const int PREFETCH_BYTES = 2048;
// Rows that share a load of weights: with two registers of columns they fill the registers that there are.
enum { FMA_ROWS = WIDTH == 16 ? 12 : 6, FMA_SOME = WIDTH == 16 ? 8 : 4, FMA_COLUMNS = 2 };

template <class W> HF_INLINE const W* pair_at(const W* tile, int pair, int col) { return tile + pair * 32 + col * 2; }
HF_INLINE const float* pair_at(const float* tile, int pair, int col) { return tile + pair * 32 + col; }

// sums [R][C registers] = rows [R][32] times columns of a tile, and of the next one behind its sixteen.
template <class W, int R, int C>
HF_INLINE void tile_sums(const float* rows, long stride, const W* tile, Wide (&sums)[R][C]) {
  Wide even[R][C];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int c = 0; c < C; c++) even[r][c] = sums[r][c] = wide_zero();
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; odd++) {
    Wide total[R][C];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int c = 0; c < C; c++) total[r][c] = wide_zero();
#pragma GCC unroll 2
    for (int pair = 0; pair < 16; pair++) {
      Wide w[C];
#pragma GCC unroll 2
      for (int c = 0; c < C; c++) {
        const W* p = pair_at(tile + c * WIDTH / 16 * TILE, pair, c * WIDTH % 16);
        w[c] = odd ? odd_of(p) : even_of(p);
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        Wide x = wide_all(rows + r * stride + 2 * pair + odd);
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) total[r][c] = wide_fma(x, w[c], total[r][c]);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int c = 0; c < C; c++) {
        if (odd) sums[r][c] = wide_add(even[r][c], total[r][c]);
        else even[r][c] = total[r][c];
      }
  }
}

// out [R][columns], rows apart by `out_stride`: `begun` or not, the sums of one tile are added. C registers of columns.
template <class W, int R, int C>
HF_INLINE void add_tile(const float* rows, long stride, const W* tile, float* out, long out_stride, bool begun) {
  Wide sums[R][C];
  tile_sums<W, R, C>(rows, stride, tile, sums);
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int c = 0; c < C; c++) {
      float* to = out + r * out_stride + c * WIDTH;
      wide_store(to, wide_add(begun ? wide_load(to) : wide_zero(), sums[r][c]));
    }
}

// Calls `block(count, first row)` for rows in blocks; the count is a constant.
template <class Block> HF_INLINE void row_blocks(int count, Block&& block) {
  int r = 0;
  for (; count - r >= FMA_ROWS && count - r != FMA_SOME * 2; r += FMA_ROWS)
    block(std::integral_constant<int, FMA_ROWS>(), r);
  for (; count - r >= FMA_SOME; r += FMA_SOME) block(std::integral_constant<int, FMA_SOME>(), r);
  for (; count - r >= 2; r += 2) block(std::integral_constant<int, 2>(), r);
  for (; r < count; r++) block(std::integral_constant<int, 1>(), r);
}

// A tile's weights in float32.
template <class W> HF_INLINE void widen_tile(const W* tile, float* out) {
  for (int pair = 0; pair < 16; pair++)
    for (int col = 0; col < 16; col += WIDTH) {
      const W* p = pair_at(tile, pair, col);
      wide_store(out + pair * 32 + col, even_of(p)), wide_store(out + pair * 32 + 16 + col, odd_of(p));
    }
}

// out [R][C registers] (+)= rows [R][tiles * 32] times as many tiles, `step` numbers apart.
template <int R, int C>
__attribute__((noinline)) void add_tiles(const float* rows, long stride, const float* tile, long step, int tiles,
                                         float* out, long out_stride, bool begun) {
  for (int k = 0; k < tiles; k++)
    add_tile<float, R, C>(rows + k * K_TILE, stride, tile + k * step, out, out_stride, begun || k);
}

// out [count][32 columns] (+)= rows [count][tiles * 32] times a panel [tiles][2][tile].
inline void add_panel(const float* rows, long stride, int count, const float* panel, int tiles, float* out,
                      long out_stride, bool begun) {
  row_blocks(count, [&](auto block, int r) {
    for (int col = 0; col < PANEL; col += FMA_COLUMNS * WIDTH)
      add_tiles<decltype(block)::value, FMA_COLUMNS>(rows + r * stride, stride, panel + col / 16 * TILE, 2 * TILE,
                                                     tiles, out + r * out_stride + col, out_stride, begun);
  });
}

// out [count][16 columns] (+)= rows [count][tiles * 32] times tiles behind one another. Few rows read them as they are.
template <class W>
HF_INLINE void add_column(const float* rows, long stride, int count, const W* tile, int tiles, float* out,
                          long out_stride, bool begun) {
  enum { C = 16 / WIDTH };
  if constexpr (sizeof(W) == 4) {
    row_blocks(count, [&](auto block, int r) {
      add_tiles<decltype(block)::value, C>(rows + r * stride, stride, tile, TILE, tiles, out + r * out_stride,
                                           out_stride, begun);
    });
  } else {
    for (int r = 0; r < count; r++)
      for (int k = 0; k < tiles; k++)
        add_tile<W, 1, C>(rows + r * stride + k * K_TILE, stride, tile + k * TILE, out + r * out_stride, out_stride,
                          begun || k);
  }
}

// sums[R][C registers] += rows [R][k tiles] times columns `col` onwards of the panel pair at `w`, by FMA.
template <class W, int R, int C>
HF_INLINE void fma_block(const float* rows, long stride, const W* w, int k_tiles, int col, int first, int end,
                         float* sums) {
  Wide total[R][C];
#pragma GCC unroll 2
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) total[r][c] = wide_zero();
  for (int k = first; k < end; k++) {
    Wide even[R][C], odd[R][C];
    const W* tile[C];
    int inner[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      int at = col + c * WIDTH;
      tile[c] = w + ((long)(at / 32) * k_tiles + k) * 2 * TILE + at / 16 % 2 * TILE;
      inner[c] = at % 16;
#pragma GCC unroll 2
      for (int r = 0; r < R; r++) even[r][c] = odd[r][c] = wide_zero();
    }
    const float* row = rows + (long)k * K_TILE;
#pragma GCC unroll 4
    for (int pair = 0; pair < 16; pair++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        const W* p = pair_at(tile[c], pair, inner[c]);
        if (R < 4) _mm_prefetch((const char*)p + PREFETCH_BYTES, _MM_HINT_T0);
        Wide e = even_of(p), o = odd_of(p);
#pragma GCC unroll 2
        for (int r = 0; r < R; r++) {
          even[r][c] = wide_fma(wide_all(row + r * stride + 2 * pair), e, even[r][c]);
          odd[r][c] = wide_fma(wide_all(row + r * stride + 2 * pair + 1), o, odd[r][c]);
        }
      }
#pragma GCC unroll 2
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) total[r][c] = wide_add(total[r][c], wide_add(even[r][c], odd[r][c]));
  }
#pragma GCC unroll 2
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) wide_store(sums + r * GROUP + col + c * WIDTH, total[r][c]);
}

}  // namespace
