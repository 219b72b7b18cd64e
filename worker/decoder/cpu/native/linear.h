// Products with packed weights: y = x W^T for 64 outputs at a time, with one order of adding for any number of rows.
//
// A packed weight is [outputs / 32][k tiles of 32][2 tiles of 16 outputs][a tile] (`tile_order.h`). Whole k tiles are added one after the other (`tiles.h` says in which order within one). A
// row-parallel weight is cut into slices of k, each summed from zero; the partial sums are added as a binary tree, so that
// ranks that hold whole subtrees give the same bits together. What is done with outputs does not live here.
#pragma once
#include <stdlib.h>

#include <algorithm>
#include <type_traits>

#include "fma.h"
#include "tiles.h"

namespace {

enum { MAX_ROWS = 256, BLOCK_ROWS = 32, MAX_LEVELS = 4 };
// Of a product by FMA: k tiles of a panel that are in the first cache, widened or as they lie.
enum { PIECE_TILES = 4, WHOLE_PIECE_TILES = 10 };
// Of two tiles of weights: cache lines; and how many k tiles of them are summed at once (a panel of 32 columns).
enum { LINES = 32, WHOLE_TILES = 32, CUT_TILES = 20 };

template <class W> struct InputOf {
  typedef float Type;
};  // what rows of a linear are stored as
template <> struct InputOf<Bf16> {
  typedef Bf16 Type;
};

template <class W> struct Packed {
  const W* tiles;
  int slices, slice_tiles, groups;
  int k_tiles() const { return slices * slice_tiles; }
  long row_length() const { return (long)k_tiles() * K_TILE; }
  const W* group(int g) const { return tiles + (long)g * k_tiles() * 4 * TILE; }
};

// Memory of one thread. Buffers grow and are kept.
struct Scratch {
  Tiles tiles;
  alignas(64) float sums[MAX_ROWS * GROUP];
  alignas(64) float partial[MAX_LEVELS][MAX_ROWS * GROUP];
  alignas(64) float widened[PIECE_TILES * 2 * TILE];
  void* factors = nullptr;  // of rows
  long factor_bytes = 0;
  long call = 0;  // whose rows are in `factors`, and which of them
  const void* rows = nullptr;
  void* factors_of(long bytes) {
    if (factor_bytes < bytes) {
      free(factors);
      factors = aligned_alloc(64, (bytes + 63) / 64 * 64);
      factor_bytes = bytes;
    }
    return factors;
  }
  ~Scratch() { free(factors); }
};

// N columns of the panels at `w`, from column `first` of 16 on, at k tile `k`.
template <int N, class W> HF_INLINE Columns<W, N> columns_of(const W* w, int k_tiles, int first, int k) {
  Columns<W, N> columns;
  for (int i = 0; i < N; i++)
    columns.first[i] = w + ((long)((first + i) / 2) * k_tiles + k) * 2 * TILE + (first + i) % 2 * TILE;
  columns.step = 2 * TILE;
  return columns;
}

// sums [count][64] = rows times one group of columns, over k tiles [first, end): a few tiles of 32 columns at a time, which
// stay in the first cache, as factors, while the rows pass. The sums are stored and taken up again, which changes no bit.
// `after`: the weights that come next, or null.
template <class F, class W>
void fma_many(const F* rows, long stride, int count, const W* w, int k_tiles, int first, int end, float* sums,
              float* widened, const W* after) {
  const int N = columns_in<FMA_COLUMNS>(), all = end - first;
  const int fitting = FactorOf<W>::AS_THEY_LIE ? WHOLE_PIECE_TILES : PIECE_TILES;
  const int piece = FactorOf<W>::AS_THEY_LIE && count <= FMA_ROWS ? all : std::min(all, fitting);
  for (int from = first; from < end; from += piece)
    for (int half = 0; half < 2; half++) {
      const int tiles = std::min(end - from, piece);
      const W* panel = columns_of<1>(w, k_tiles, half * 2, from).first[0];
      const W* next = half == 0            ? columns_of<1>(w, k_tiles, 2, from).first[0]
                      : from + piece < end ? columns_of<1>(w, k_tiles, 0, from + piece).first[0]
                                           : after;
      if (!FactorOf<W>::AS_THEY_LIE)
        for (int i = 0; i < tiles * 2; i++) {
          if (count <= FMA_ROWS)
            for (int step = 0; step < 16; step++) fetch_ahead<16>(panel + i * TILE, step, FAR_BYTES);
          widen_tile(panel + i * TILE, widened + i * TILE);
        }
      for (int col = 0; col < 2; col += N) {
        const F* some = rows + factors_in<F>((long)from * K_TILE);
        float* out = sums + half * PANEL + col * 16;
        const bool is_last = col + N >= 2;
        const long bytes = tiles * 2 * TILE * sizeof(W);
        if constexpr (FactorOf<W>::AS_THEY_LIE)
          add_many<FMA_COLUMNS, true>(some, stride, count, columns_of<N>(panel, tiles, col, 0), tiles, out, GROUP,
                                      from > first, is_last ? next : nullptr, bytes);
        else
          add_many<FMA_COLUMNS, false>(some, stride, count, columns_of<N>((const float*)widened, tiles, col, 0), tiles,
                                       out, GROUP, from > first, is_last ? next : nullptr, bytes);
      }
    }
}
template <class F, class W>
void fma_rows(const F* rows, long stride, int count, const W* w, int k_tiles, int first, int end, float* sums,
              float* widened, const W* after) {
  if (count > FEW_ROWS) return fma_many(rows, stride, count, w, k_tiles, first, end, sums, widened, after);
  rows += factors_in<F>((long)first * K_TILE);
  int r = 0;
  for (; r + 2 <= count; r += 2)
    for (int c = 0; c < GROUP; c += 2 * WIDTH)
      add_both<2, 2, PREFETCH_BYTES>(rows + r * stride, stride, columns_of<columns_in<2>()>(w, k_tiles, c / 16, first), end - first,
                    sums + r * GROUP + c, GROUP, false, {});
  for (; r < count; r++)
    for (int c = 0; c < GROUP; c += FEW_COLUMNS * WIDTH)
      add_both<1, FEW_COLUMNS, PREFETCH_BYTES>(rows + r * stride, stride,
                              columns_of<columns_in<FEW_COLUMNS>()>(w, k_tiles, c / 16, first), end - first,
                              sums + r * GROUP + c, GROUP, false, {});
}

#ifdef HF_TILES
HF_INLINE void prefetch_tile(const Bf16* tile) {
  for (int i = 0; i < 1024; i += 64) _mm_prefetch((const char*)tile + PREFETCH_BYTES + i, _MM_HINT_T0);
}

// Up to 16 rows and 64 columns: four accumulators side by side.
HF_INLINE void tiles_1x4(Tiles& t, const Bf16* rows, long stride, const Bf16* w, int k_tiles, int first, int end,
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
HF_INLINE void fetch(Ahead ahead, int tile) {
  const char* at = (const char*)(ahead.panel + (long)tile * 2 * TILE);
  for (int i = 0; i < ahead.lines; i++) _mm_prefetch(at + i * 64, _MM_HINT_T1);
}

// 17 to 32 rows and 32 columns: two by two accumulators, which go on from `sums` if they have begun.
template <bool FAR>
HF_INLINE void tiles_2x2(Tiles& t, const Bf16* rows, long stride, const Bf16* w, int first, int end, float* sums,
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
HF_INLINE void tiles_1x2(Tiles& t, const Bf16* rows, long stride, const Bf16* w, int first, int end, float* sums,
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
HF_INLINE void pass_rows(Tiles& t, const Bf16* rows, long stride, int count, const Bf16* panel, int first, int end,
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

// Rows [count][row length] of one linear's inputs, as the products want them.
template <class W> struct InputRows {
  typedef typename InputOf<W>::Type Input;
  typedef typename FactorOf<W>::Type Factor;
  const Input* rows;
  long stride;
  int count;
  const Factor* factors;  // the same; null where tiles are used
  long factor_stride;
};

// One row streams faster by FMA, from two on tiles do: the bits are the same.
template <class W> HF_INLINE bool uses_tiles(int count) {
#ifdef HF_TILES
  return std::is_same<W, Bf16>::value && count > 1;
#else
  return (void)count, false;
#endif
}

// `call`: numbers a product of many tasks, whose rows stay as they are: a thread makes factors of them once. 0: there is
// one task.
template <class W>
InputRows<W> input_rows(Scratch& scratch, const typename InputOf<W>::Type* rows, long stride, int count, long length,
                        long call = 0) {
  typedef typename InputRows<W>::Factor Factor;
  InputRows<W> input = {rows, stride, count, nullptr, factors_in<Factor>(length)};
  if constexpr (std::is_same<Factor, typename InputOf<W>::Type>::value) {
    input.factors = rows, input.factor_stride = stride;
  } else if (!uses_tiles<W>(count)) {
    bool is_there = call && scratch.call == call && scratch.rows == rows;
    Factor* factors = (Factor*)scratch.factors_of(input.factor_stride * count * sizeof(Factor));
    for (int r = is_there ? count : 0; r < count; r++)
      for (long k = 0; k < length; k += 16)
        store_factors(factors + r * input.factor_stride + factors_in<Factor>(k), rows + r * stride + k);
    input.factors = factors, scratch.call = call, scratch.rows = rows;
  }
  return input;
}

template <class W>
void slice_product(Scratch& scratch, const Packed<W>& w, int group, const InputRows<W>& in, int slice, float* sums,
                   bool more_groups = false) {
  int first = slice * w.slice_tiles, end = first + w.slice_tiles;
  const W* after = slice + 1 < w.slices ? w.group(group) + (long)end * 2 * TILE
                   : more_groups        ? w.group(group + 1)
                                        : nullptr;
#ifdef HF_TILES
  if constexpr (sizeof(W) == 2 && sizeof(*in.rows) == 2)
    if (!in.factors)
      return tile_rows(scratch.tiles, in.rows, in.stride, in.count, w.group(group), w.k_tiles(), first, end, sums,
                       after);
#endif
  typedef typename InputRows<W>::Factor Factor;
  fma_rows<Factor, W>(in.factors, in.factor_stride, in.count, w.group(group), w.k_tiles(), first, end, sums,
                      scratch.widened, after);
}

HF_INLINE void add_to(float* sums, const float* others, int count) {
  for (int i = 0; i < count; i += 16) store(sums + i, load(sums + i) + load(others + i));
}

// sums [count][64]: all slices, added as a binary tree over their numbers. `more_groups`: the next group comes next.
template <class W>
void product(Scratch& scratch, const Packed<W>& w, int group, const InputRows<W>& in, float* sums,
             bool more_groups = false) {
  float* level[MAX_LEVELS + 1] = {sums, scratch.partial[0], scratch.partial[1], scratch.partial[2], scratch.partial[3]};
  int top = 0;
  for (int slice = 0; slice < w.slices; slice++) {
    slice_product(scratch, w, group, in, slice, level[top++], more_groups);
    for (int done = slice + 1; done % 2 == 0; done /= 2) top--, add_to(level[top - 1], level[top], in.count * GROUP);
  }
}

}  // namespace
