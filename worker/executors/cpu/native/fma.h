// Products by fused multiply-add, in the order of the tile unit: rows of factors times tiles of 32 inputs and 16 outputs.
//
// A tile's even inputs are summed from +0, its odd ones likewise, and the two are added. Many rows take the even ones first and
// then the odd ones, so that registers hold as many rows as they can; few rows take both at once. Which tiles there are, and
// what becomes of the sums, does not live here.
#pragma once
#include <type_traits>

#include "factors.h"
#include "pairs_block.h"

namespace {

enum { PANEL = 32, GROUP = 64 };
// How far ahead weights are fetched that stream past rows: by the tile unit, and in all other ways.
const int PREFETCH_BYTES = 2048, FAR_BYTES = 8192;
// Rows that share a load of weights: with two registers of columns they fill the registers that there are.
enum { FMA_ROWS = WIDTH == 16 ? 8 : 6, FMA_SOME = 4, FMA_COLUMNS = 2 };
enum { BOTH_ROWS = 4 };                  // the same, if registers hold the sums of even and odd inputs and of all tiles
enum { FEW_ROWS = 3, FEW_COLUMNS = 4 };  // rows that stream, and registers of columns for one of them

// The first tiles of N columns of 16 outputs, and how far from each the tile of the next 32 inputs is. `ahead`: bytes from a
// column's tiles to what is fetched while they are multiplied.
template <class W, int N> struct Columns {
  const W* first[N];
  long step;
  long ahead[N] = {};
  void fetch(int i, const void* later) { ahead[i] = (long)((uintptr_t)later - (uintptr_t)first[i]); }
};
enum { AS_COLUMNS_SAY = -1 };  // instead of a number of bytes by which weights are fetched ahead
template <int AHEAD, class W, int N> NATIVE_INLINE long ahead_of(const Columns<W, N>& columns, int i) {
  return AHEAD == AS_COLUMNS_SAY ? columns.ahead[i] : AHEAD;
}
template <int C> constexpr int columns_in() { return C * WIDTH / 16 ? C * WIDTH / 16 : 1; }

// Asks for what a step takes of the weights that come `ahead` bytes later.
template <int STEPS, class W> NATIVE_INLINE void fetch_ahead(const W* tile, int step, long ahead) {
  const int bytes = TILE * sizeof(W) / STEPS;
#pragma GCC unroll 2
  for (int i = 0; i < bytes; i += 64) _mm_prefetch((const char*)tile + step * bytes + i + ahead, _MM_HINT_T0);
}

// out [R][C registers] (+)= rows [R][32] times k tile `k` of each column. `AHEAD`: bytes by which weights are fetched, or 0.
template <class F, class W, int R, int C, int AHEAD>
NATIVE_INLINE void add_tile(const F* rows, long stride, const Columns<W, columns_in<C>()>& columns, int k, float* out,
                            long out_stride, bool begun) {
  Wide even[R][C];
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; odd++) {
    Wide total[R][C];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int c = 0; c < C; c++) total[r][c] = wide_zero();
#pragma GCC unroll 2
    for (int step = 0; step < Factors<F>::STEPS; step++) {
      typename Factors<F>::Many w[C];
#pragma GCC unroll 2
      for (int c = 0; c < C; c++) {
        const W* tile = columns.first[c * WIDTH / 16] + k * columns.step;
        if (AHEAD && !odd && c * WIDTH % 16 == 0)
          fetch_ahead<Factors<F>::STEPS>(tile, step, ahead_of<AHEAD>(columns, c * WIDTH / 16));
        w[c] = odd ? Factors<F>::odd(tile, step, c * WIDTH % 16) : Factors<F>::even(tile, step, c * WIDTH % 16);
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        typename Factors<F>::Many x = Factors<F>::all(rows + r * stride + 2 * step + odd);
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) total[r][c] = Factors<F>::add_product(total[r][c], x, w[c]);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int c = 0; c < C; c++) {
        float* to = out + r * out_stride + c * WIDTH;
        if (!odd) even[r][c] = total[r][c];
        else wide_store(to, wide_add(begun ? wide_load(to) : wide_zero(), wide_add(even[r][c], total[r][c])));
      }
  }
}

// What is multiplied next: cache lines of it that are fetched into the second cache with each tile.
struct Next {
  const char* weights;  // or null
  int lines;
};

// out [R][C registers] (+)= rows [R][tiles * 32] times as many tiles of each column.
template <int R, int C, int AHEAD, class F, class W>
__attribute__((noinline)) void add_tiles(const F* rows, long stride, const Columns<W, columns_in<C>()>& columns,
                                         int tiles, float* out, long out_stride, bool begun, Next next) {
  for (int k = 0; k < tiles; k++) {
    for (int i = 0; i < next.lines; i++, next.weights += 64) _mm_prefetch(next.weights, _MM_HINT_T1);
    add_tile<F, W, R, C, AHEAD>(rows + k * Factors<F>::PER_TILE, stride, columns, k, out, out_stride, begun || k);
  }
}

// The same, even and odd inputs at once, and sums that stay in registers. `AHEAD`: bytes by which weights are fetched, or 0.
template <int R, int C, int AHEAD, class F, class W>
NATIVE_INLINE void add_both(const F* rows, long stride, const Columns<W, columns_in<C>()>& columns, int tiles,
                            float* out, long out_stride, bool begun, Next next) {
  Wide total[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) total[r][c] = begun ? wide_load(out + r * out_stride + c * WIDTH) : wide_zero();
  for (int k = 0; k < tiles; k++) {
    for (int i = 0; i < next.lines; i++, next.weights += 64) _mm_prefetch(next.weights, _MM_HINT_T1);
    Wide even[R][C], odd[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) even[r][c] = odd[r][c] = wide_zero();
    const F* row = rows + k * Factors<F>::PER_TILE;
#pragma GCC unroll 4
    for (int step = 0; step < Factors<F>::STEPS; step++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        const W* tile = columns.first[c * WIDTH / 16] + k * columns.step;
        if (AHEAD && c * WIDTH % 16 == 0)
          fetch_ahead<Factors<F>::STEPS>(tile, step, ahead_of<AHEAD>(columns, c * WIDTH / 16));
        auto e = Factors<F>::even(tile, step, c * WIDTH % 16), o = Factors<F>::odd(tile, step, c * WIDTH % 16);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          even[r][c] = Factors<F>::add_product(even[r][c], Factors<F>::all(row + r * stride + 2 * step), e);
          odd[r][c] = Factors<F>::add_product(odd[r][c], Factors<F>::all(row + r * stride + 2 * step + 1), o);
        }
      }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) total[r][c] = wide_add(total[r][c], wide_add(even[r][c], odd[r][c]));
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) wide_store(out + r * out_stride + c * WIDTH, total[r][c]);
}

// Calls `block(count, first row)` for rows in blocks of at most MOST; the count is a constant.
template <int MOST, class Block> NATIVE_INLINE void row_blocks(int count, Block&& block) {
  int r = 0;
  for (; count - r >= MOST; r += MOST) block(std::integral_constant<int, MOST>(), r);
  for (; count - r >= FMA_SOME; r += FMA_SOME) block(std::integral_constant<int, FMA_SOME>(), r);
  for (; count - r >= 2; r += 2) block(std::integral_constant<int, 2>(), r);
  for (; r < count; r++) block(std::integral_constant<int, 1>(), r);
}

// Any number of rows up to `FMA_ROWS` at once, which streams columns past them and fetches what these say.
template <int C, int R = 1, class F, class W>
NATIVE_INLINE void add_few(const F* rows, long stride, int count, const Columns<W, columns_in<C>()>& columns, int tiles,
                           float* out, long out_stride, bool begun) {
  const int SUMS = WIDTH == 16 ? 16 : 8;  // of even and of odd inputs that registers hold beside the totals
  if (count > R) {
    if constexpr (R < FMA_ROWS) add_few<C, R + 1>(rows, stride, count, columns, tiles, out, out_stride, begun);
  } else if constexpr (2 * R * C <= SUMS)
    add_both<R, C, AS_COLUMNS_SAY>(rows, stride, columns, tiles, out, out_stride, begun, {});
  else add_tiles<R, C, AS_COLUMNS_SAY>(rows, stride, columns, tiles, out, out_stride, begun, {});
}

// Of many rows: blocks that take even and odd inputs at once.
template <int R, int C, bool FAR, class F, class W>
__attribute__((noinline)) void add_block(const F* rows, long stride, const Columns<W, columns_in<C>()>& columns,
                                         int tiles, float* out, long out_stride, bool begun, Next next) {
  if constexpr (R == 4 && C == 2 && !FAR && has_block_4x2<F>) {
    for (int r = 0; r < (begun ? 0 : R); r++)
      for (int c = 0; c < C; c++) wide_store(out + r * out_stride + c * WIDTH, wide_zero());
    for (int k = 0; k < tiles; k++) {
      for (int i = 0; i < next.lines; i++, next.weights += 64) _mm_prefetch(next.weights, _MM_HINT_T1);
      add_block_4x2(rows + k * Factors<F>::PER_TILE, stride, columns.first[0] + k * columns.step,
                    columns.first[1] + k * columns.step, out, out_stride);
    }
  } else add_both<R, C, FAR ? FAR_BYTES : 0>(rows, stride, columns, tiles, out, out_stride, begun, next);
}

// out [count][C registers] (+)= rows [count][tiles * 32] times as many tiles of each column. `FAR`: they are far from the
// caches, and the first rows fetch them. `next`: [bytes] that come next, or null, which the other rows fetch, or all.
template <int C, bool FAR, class F, class W>
NATIVE_INLINE void add_many(const F* rows, long stride, int count, const Columns<W, columns_in<C>()>& columns,
                            int tiles, float* out, long out_stride, bool begun, const void* next = nullptr,
                            long bytes = 0) {
  const bool holds_both = WIDTH == 16 && count > FMA_ROWS;
  const int most = holds_both ? BOTH_ROWS : FMA_ROWS;
  const int others = ((count - 1) / most + !FAR) * tiles;  // tiles that fetch what comes next
  const int lines = next && others ? (int)((bytes / 64 + others - 1) / others) : 0;
  auto with = [&](int r, auto first, auto other) {
    long before = (long)(r / most - FAR) * tiles * lines * 64;
    Next some = r || !FAR ? Next{(const char*)next + before, lines} : Next{nullptr, 0};
    (r || !FAR ? other : first)(rows + r * stride, stride, columns, tiles, out + r * out_stride, out_stride, begun,
                                some);
  };
  if (holds_both)
    row_blocks<BOTH_ROWS>(count, [&](auto block, int r) {
      const int R = decltype(block)::value;
      with(r, &add_block<R, C, true, F, W>, &add_block<R, C, false, F, W>);
    });
  else
    row_blocks<FMA_ROWS>(count, [&](auto block, int r) {
      const int R = decltype(block)::value;
      with(r, &add_tiles<R, C, FAR_BYTES, F, W>, &add_tiles<R, C, 0, F, W>);
    });
}

}  // namespace
