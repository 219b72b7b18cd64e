// Products with packed weights: y = x W^T for 64 outputs at a time, with one order of adding for any number of rows.
//
// A packed weight is [outputs / 32][k tiles of 32][2 tiles of 16 outputs][a tile] (`tile_order.h`). Whole k tiles are added one after the other (`tiles.h` says in which order within one). A
// row-parallel weight is cut into slices of k, each summed from zero; the partial sums are added as a binary tree, so that
// ranks that hold whole subtrees give the same bits together. What is done with outputs does not live here.
#pragma once
#include <stdlib.h>

#include <algorithm>
#include <type_traits>

#include "coded_tiles.h"
#include "compact_stream.h"
#include "fma.h"
#include "tile_rows.h"
#include "unit_products.h"

namespace {

enum { MAX_ROWS = 256, MAX_LEVELS = 4 };
// Of a product by FMA: k tiles of a panel that are in the first cache, widened or as they lie.
enum { PIECE_TILES = 4, WHOLE_PIECE_TILES = 10 };

template <class W> struct InputOf {
  typedef float Type;
};  // what rows of a linear are stored as
template <> struct InputOf<Bf16> {
  typedef Bf16 Type;
};

template <class W> struct Packed {
  const W* tiles;
  int slices, slice_tiles, groups;
  long panel_bytes;  // of compact panels (`compact_order.h`), or of panels of units; 0: the tiles lie as they are
  UnitForm units;    // a unit lies where a k tile would
  const NativePanel* panels;  // each of its own form, or null
  int code_run;               // of panels of codes (`coded_order.h`); 0: it has none
  int k_tiles() const { return slices * slice_tiles; }
  long row_length() const { return (long)k_tiles() * K_TILE; }
  const W* group(int g) const { return tiles + (long)g * k_tiles() * 4 * TILE; }
  CompactPanel panel(int i) const { return {(const char*)tiles + i * panel_bytes, k_tiles() * 2}; }
  CodedPanel coded_panel(int i) const { return {(const char*)tiles + i * panel_bytes, k_tiles(), code_run}; }
  UnitPanel unit_panel(int i, int first, int count) const {
    const UnitForm form = panels ? form_of(panels[i].units) : units;
    const uint8_t* panel = panels ? (const uint8_t*)panels[i].first : (const uint8_t*)tiles + i * panel_bytes;
    const uint8_t* factors = panel + (long)k_tiles() * form.unit_bytes();
    return {panel + (long)first * form.unit_bytes(),
            count,
            form,
            units_ahead(form),
            factors,
            form.before + first,
            nullptr,
            0};
  }
};

// Of 16 outputs, the tile of inputs 32 `k` onwards as it was packed; `read` is room for one that is compact.
template <class W> NATIVE_INLINE const W* tile_of(const Packed<W>& w, int column, int k, W* read) {
  if constexpr (std::is_same<W, Bf16>::value)
    if (w.code_run) {
      const CodedPanel panel = w.coded_panel(column / 2);
      return read_coded_tile<0>(panel.tile(k * 2 + column % 2), panel.scales(k) + column % 2 * 16, read), read;
    }
  if constexpr (std::is_same<W, Bf16>::value)
    if (w.panel_bytes) return read_tiles<0>(w.panel(column / 2), k * 2 + column % 2, 1, read), read;
  return w.tiles + ((long)(column / 2) * w.k_tiles() + k) * 2 * TILE + column % 2 * TILE;
}

// Memory of one thread. Buffers grow and are kept.
struct Scratch {
  Tiles tiles;
  alignas(64) float sums[MAX_ROWS * GROUP];
  alignas(64) float partial[MAX_LEVELS][MAX_ROWS * GROUP];
  alignas(64) float widened[PIECE_TILES * 2 * TILE];
  alignas(64) Bf16 read[WHOLE_PIECE_TILES * 2 * TILE];  // of compact weights
  void* factors = nullptr;                              // of rows
  long factor_bytes = 0;
  long call = 0;  // whose rows are in `factors`, and which of them
  const void* rows = nullptr;
  Aside adapters;
  Aside* aside = nullptr;  // what is fetched beside the weights of the next product, or null
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
template <int N, class W> NATIVE_INLINE Columns<W, N> columns_of(const W* w, int k_tiles, int first, int k) {
  Columns<W, N> columns;
  for (int i = 0; i < N; i++)
    columns.first[i] = w + ((long)((first + i) / 2) * k_tiles + k) * 2 * TILE + (first + i) % 2 * TILE;
  columns.step = 2 * TILE;
  return columns;
}

// sums [count][32] (+)= rows times some k tiles of a panel, as factors. `FAR`: as in `add_many`, like `next` and `bytes`.
template <bool FAR, class F, class W>
NATIVE_INLINE void add_factors(const F* rows, long stride, int count, const W* panel, int tiles, float* sums,
                               bool begun, const void* next, long bytes) {
  const int N = columns_in<FMA_COLUMNS>();
  for (int col = 0; col < 2; col += N) {
    const void* then = col + N >= 2 ? next : nullptr;
    add_many<FMA_COLUMNS, FAR>(rows, stride, count, columns_of<N>(panel, tiles, col, 0), tiles, sums + col * 16, GROUP,
                               begun, then, bytes);
  }
}

// The same of a panel whose tiles may have to be widened first.
template <bool FAR, class F, class W>
NATIVE_INLINE void add_panel(const F* rows, long stride, int count, const W* panel, int tiles, float* sums, bool begun,
                             float* widened, const void* next, long bytes) {
  if constexpr (FactorOf<W>::AS_THEY_LIE) {
    add_factors<FAR>(rows, stride, count, panel, tiles, sums, begun, next, bytes);
  } else {
    for (int i = 0; i < tiles * 2; i++) {
      if (FAR && count <= FMA_ROWS)
        for (int step = 0; step < 16; step++) fetch_ahead<16>(panel + i * TILE, step, FAR_BYTES);
      widen_tile(panel + i * TILE, widened + i * TILE);
    }
    add_factors<false>(rows, stride, count, (const float*)widened, tiles, sums, begun, next, bytes);
  }
}

// sums [count][64] = rows times one group of columns, over k tiles [first, end): a few tiles of 32 columns at a time, which
// stay in the first cache, as factors, while the rows pass. The sums are stored and taken up again, which changes no bit.
// `after`: the weights that come next, or null.
template <class F, class W>
void fma_many(const F* rows, long stride, int count, const W* w, int k_tiles, int first, int end, float* sums,
              float* widened, const W* after) {
  const int all = end - first, fitting = FactorOf<W>::AS_THEY_LIE ? WHOLE_PIECE_TILES : PIECE_TILES;
  const int pieces = (all + fitting - 1) / fitting;
  const int piece = FactorOf<W>::AS_THEY_LIE && count <= FMA_ROWS ? all : (all + pieces - 1) / pieces;
  for (int from = first; from < end; from += piece)
    for (int half = 0; half < 2; half++) {
      const int tiles = std::min(end - from, piece);
      const W* panel = columns_of<1>(w, k_tiles, half * 2, from).first[0];
      const W* next = half == 0            ? columns_of<1>(w, k_tiles, 2, from).first[0]
                      : from + piece < end ? columns_of<1>(w, k_tiles, 0, from + piece).first[0]
                                           : after;
      add_panel<true>(rows + factors_in<F>((long)from * K_TILE), stride, count, panel, tiles, sums + half * PANEL,
                      from > first, widened, next, tiles * 2 * TILE * sizeof(W));
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
      add_both<2, 2, FAR_BYTES>(rows + r * stride, stride, columns_of<columns_in<2>()>(w, k_tiles, c / 16, first),
                                end - first, sums + r * GROUP + c, GROUP, false, {});
  for (; r < count; r++)
    for (int c = 0; c < GROUP; c += FEW_COLUMNS * WIDTH)
      add_both<1, FEW_COLUMNS, FAR_BYTES>(rows + r * stride, stride,
                                          columns_of<columns_in<FEW_COLUMNS>()>(w, k_tiles, c / 16, first), end - first,
                                          sums + r * GROUP + c, GROUP, false, {});
}

// The weights of an output of a linear that is kept in units: [row length].
template <class W> const W* row_of_units(const Packed<W>& w, int row, W* out) {
  alignas(64) float numbers[UNIT];
  const UnitPanel panel = w.unit_panel(row / UNIT_OUTPUTS, 0, w.k_tiles());
  for (int u = 0; u < panel.count; u++) {
    for (int k = 0; k < UNIT; k++) numbers[k] = number_of_unit(panel, u, k, row % UNIT_OUTPUTS);
    for (int k = 0; k < UNIT; k += 16) store(out + u * UNIT + k, load(numbers + k));
  }
  return out;
}

// Rows [count][row length] of one linear's inputs, as the products want them.
template <class W> struct InputRows {
  typedef typename InputOf<W>::Type Input;
  typedef typename FactorOf<W>::Type Factor;
  const Input* rows;
  long stride;
  int count;
  const Factor* factors;  // the same; null where tiles are used
  long factor_stride;
  const RowUnit* units;  // the same, of a weight in units; there are no factors then
};

// Rows that are in units already, beside each other.
template <class W> NATIVE_INLINE InputRows<W> rows_in_units(const RowUnit* units, int count) {
  return {nullptr, 0, count, nullptr, 0, units};
}

// One row streams faster by FMA, from two on tiles do: the bits are the same.
template <class W> NATIVE_INLINE bool uses_tiles(int count) {
#ifdef NATIVE_TILES
  return std::is_same<W, Bf16>::value && count > 1;
#else
  return (void)count, false;
#endif
}

template <class W> void unit_rows_of(Scratch& scratch, const Packed<W>& w, InputRows<W>& input, long call) {
  const bool is_there = call && scratch.call == call && scratch.rows == input.rows;
  const long k_tiles = w.k_tiles();
  RowUnit* units = (RowUnit*)scratch.factors_of(k_tiles * input.count * sizeof(RowUnit));
  for (int r = is_there ? input.count : 0; r < input.count; r++)
    quantize_row(input.rows + r * input.stride, k_tiles, units + r * k_tiles);
  input.units = units, scratch.call = call, scratch.rows = input.rows;
}

// `call`: numbers a product of many tasks, whose rows stay as they are: a thread makes factors of them once. 0: there is
// one task.
template <class W>
InputRows<W> input_rows(Scratch& scratch, const Packed<W>& w, const typename InputOf<W>::Type* rows, long stride,
                        int count, long call = 0) {
  typedef typename InputRows<W>::Factor Factor;
  const long length = w.row_length();
  InputRows<W> input = {rows, stride, count, nullptr, factors_in<Factor>(length), nullptr};
  if (w.units.is_there()) return unit_rows_of(scratch, w, input, call), input;
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

// A slice of one panel of a group, `half` 0 or 1, and what this thread likely multiplies then.
NATIVE_INLINE CompactRun compact_run(const Packed<Bf16>& w, int group, int half, int first, int end, int next_group) {
  const CompactPanel panel = w.panel(group * 2 + half);
  if (half == 0) return {panel, first, end, w.panel(group * 2 + 1), first};
  if (end < w.k_tiles()) return {panel, first, end, w.panel(group * 2), end};
  if (next_group >= 0) return {panel, first, end, w.panel(next_group * 2), 0};
  return {panel, first, end, {nullptr, 0}, 0};
}

// Of more than a few rows by other factors than pairs: some tiles of a panel at a time are read into the first cache.
template <class F> void compact_pieces(Scratch& scratch, const InputRows<Bf16>& in, const CompactRun& run, float* out) {
  const int fitting = in.factors ? PIECE_TILES : WHOLE_PIECE_TILES;
  const int pieces = (run.end - run.first + fitting - 1) / fitting, piece = (run.end - run.first + pieces - 1) / pieces;
  for (int from = run.first; from < run.end; from += piece) {
    const int tiles = std::min(run.end - from, piece);
    if (run.aside_lines) run.aside->some(tiles * run.aside_lines);
#if !defined(__AVX512F__) && !defined(NATIVE_PAIRS)
    if (in.factors) {
      (from > run.first ? widen_compact<0> : widen_compact<FAR_BYTES>)(run.panel, from, tiles, scratch.widened);
      add_factors<false>(in.factors + (long)from * K_TILE, in.factor_stride, in.count, (const float*)scratch.widened,
                         tiles, out, from > run.first, run.later(from, piece), tiles * (long)BOTH_TILES);
      continue;
    }
#endif
    if (in.factors && from > run.first) read_tiles<0>(run.panel, from * 2, tiles * 2, scratch.read);
    else read_tiles<FAR_BYTES>(run.panel, from * 2, tiles * 2, scratch.read);
#ifdef NATIVE_TILES
    if (!in.factors) {
      pass_rows(scratch.tiles, in.rows + (long)from * K_TILE, in.stride, in.count, scratch.read, 0, tiles, out,
                from > run.first, nullptr);
      continue;
    }
#endif
    add_panel<false>(in.factors + factors_in<F>((long)from * K_TILE), in.factor_stride, in.count, scratch.read, tiles,
                     out, from > run.first, scratch.widened, run.later(from, piece), tiles * (long)BOTH_TILES);
  }
}

template <class F>
void compact_product(Scratch& scratch, const Packed<Bf16>& w, int group, const InputRows<Bf16>& in, int first, int end,
                     float* sums, int next_group) {
  for (int half = 0; half < 2; half++) {
    CompactRun run = compact_run(w, group, half, first, end, next_group);
    if (scratch.aside) run.aside = scratch.aside, run.aside_lines = scratch.aside->share(2 * w.k_tiles());
    float* out = sums + half * PANEL;
#if defined(__AVX512F__) || !defined(NATIVE_PAIRS)
    if (in.factors && in.count <= most_in_registers<F>) {
      compact_rows<F>(in.factors, in.factor_stride, in.count, run, out, GROUP);
      continue;
    }
#endif
    if constexpr (FactorOf<Bf16>::AS_THEY_LIE)
      (run.aside_lines ? stream_rows<true, F> : stream_rows<false, F>)(in.factors, in.factor_stride, in.count, run,
                                                                       scratch.read, out, GROUP);
    else compact_pieces<F>(scratch, in, run, out);
  }
}

// A piece of a panel in codes: k tiles [from, from + tiles), which are read into the first cache.
template <class F>
NATIVE_INLINE void coded_piece(Scratch& scratch, const InputRows<Bf16>& in, const CodedPanel& panel, int from,
                               int tiles, float* out, bool begun) {
#if !defined(__AVX512F__) && !defined(NATIVE_PAIRS)
  if (in.factors) {
    widen_coded(panel, from, tiles, scratch.widened);
    return add_factors<false>(in.factors + (long)from * K_TILE, in.factor_stride, in.count,
                              (const float*)scratch.widened, tiles, out, begun, nullptr, 0);
  }
#endif
  read_coded<FAR_BYTES>(panel, from, tiles, scratch.read);
#ifdef NATIVE_TILES
  if (!in.factors)
    return pass_rows(scratch.tiles, in.rows + (long)from * K_TILE, in.stride, in.count, scratch.read, 0, tiles, out,
                     begun, nullptr);
#endif
  add_panel<false>(in.factors + factors_in<F>((long)from * K_TILE), in.factor_stride, in.count, scratch.read, tiles,
                   out, begun, scratch.widened, nullptr, 0);
}

// Of weights in codes: few rows in registers, more by pieces.
template <class F>
void coded_product(Scratch& scratch, const Packed<Bf16>& w, int group, const InputRows<Bf16>& in, int first, int end,
                   float* sums) {
  const int piece = !in.factors || FactorOf<Bf16>::AS_THEY_LIE ? WHOLE_PIECE_TILES : PIECE_TILES;
  for (int half = 0; half < 2; half++) {
    const CodedPanel panel = w.coded_panel(group * 2 + half);
    float* out = sums + half * PANEL;
#ifdef __AVX512F__
    if (in.factors && in.count <= most_in_registers<F>) {
      coded_rows<F>(in.factors, in.factor_stride, in.count, panel, first, end, out, GROUP);
      continue;
    }
#elif !defined(NATIVE_PAIRS)
    if (in.factors && in.count <= FEW_ROWS) {
      coded_rows(in.factors, in.factor_stride, in.count, panel, first, end, out, GROUP);
      continue;
    }
#endif
    for (int from = first; from < end; from += piece)
      coded_piece<F>(scratch, in, panel, from, std::min(end - from, piece), out, from > first);
  }
}

NATIVE_INLINE void add_to(float* sums, const float* others, int count) {
  for (int i = 0; i < count; i += 16) store(sums + i, load(sums + i) + load(others + i));
}

// A slice of one panel of a group, `half` 0 or 1, and what this thread likely multiplies then.
template <class W>
NATIVE_INLINE UnitPanel units_of_slice(const Packed<W>& w, int group, int half, int first, int next_group) {
  UnitPanel panel = w.unit_panel(2 * group + half, first, w.slice_tiles);
  const int end = first + w.slice_tiles;
  UnitPanel next = half == 0           ? w.unit_panel(2 * group + 1, first, w.slice_tiles)
                   : end < w.k_tiles() ? w.unit_panel(2 * group, end, w.slice_tiles)
                   : next_group >= 0   ? w.unit_panel(2 * next_group, 0, w.slice_tiles)
                                       : UnitPanel{};
  panel.next = next.first, panel.next_bytes = (long)next.count * next.form.unit_bytes();
  return panel;
}

template <class W>
void slice_of_units(const Packed<W>& w, int group, const RowUnit* rows, int count, int first, float* sums,
                    int next_group) {
  for (int half = 0; half < 2; half++)
    unit_products(rows, w.k_tiles(), count, units_of_slice(w, group, half, first, next_group), sums + half * PANEL,
                  GROUP);
}

template <class W>
void slice_product(Scratch& scratch, const Packed<W>& w, int group, const InputRows<W>& in, int slice, float* sums,
                   int next_group = -1) {
  int first = slice * w.slice_tiles, end = first + w.slice_tiles;
  if (w.units.is_there()) return slice_of_units(w, group, in.units + first, in.count, first, sums, next_group);
  if constexpr (std::is_same<W, Bf16>::value)
    if (w.code_run) return coded_product<typename InputRows<W>::Factor>(scratch, w, group, in, first, end, sums);
  if constexpr (std::is_same<W, Bf16>::value)
    if (w.panel_bytes)
      return compact_product<typename InputRows<W>::Factor>(scratch, w, group, in, first, end, sums, next_group);
  const W* after = slice + 1 < w.slices ? w.group(group) + (long)end * 2 * TILE
                   : next_group >= 0    ? w.group(next_group)
                                        : nullptr;
#ifdef NATIVE_TILES
  if constexpr (sizeof(W) == 2 && sizeof(*in.rows) == 2)
    if (!in.factors)
      return tile_rows(scratch.tiles, in.rows, in.stride, in.count, w.group(group), w.k_tiles(), first, end, sums,
                       after);
#endif
  typedef typename InputRows<W>::Factor Factor;
  fma_rows<Factor, W>(in.factors, in.factor_stride, in.count, w.group(group), w.k_tiles(), first, end, sums,
                      scratch.widened, after);
}

// Whether products with a weight fetch what is aside with each k tile; others do so before each slice.
template <class W> NATIVE_INLINE bool takes_aside(const Packed<W>& w) {
  return w.panel_bytes && !w.code_run && !w.units.is_there();
}

// sums [count][64]: all slices, added as a binary tree over their numbers. `next_group`: which this thread likely takes
// next, or -1. `adds(slice, sums)` may add to the sums of each slice.
template <class W, class Adds>
void product(Scratch& scratch, const Packed<W>& w, int group, const InputRows<W>& in, float* sums, int next_group,
             Adds&& adds) {
  float* level[MAX_LEVELS + 1] = {sums, scratch.partial[0], scratch.partial[1], scratch.partial[2], scratch.partial[3]};
  int top = 0;
  const int aside = scratch.aside && !takes_aside<W>(w) ? scratch.aside->share(w.slices) : 0;
  for (int slice = 0; slice < w.slices; slice++) {
    if (aside) scratch.aside->some(aside);
    slice_product(scratch, w, group, in, slice, level[top], next_group);
    adds(slice, level[top++]);
    for (int done = slice + 1; done % 2 == 0; done /= 2) top--, add_to(level[top - 1], level[top], in.count * GROUP);
  }
  for (; top > 1; top--)
    add_to(level[top - 2], level[top - 1], in.count * GROUP);  // of slices that are no power of two
}
template <class W>
void product(Scratch& scratch, const Packed<W>& w, int group, const InputRows<W>& in, float* sums,
             int next_group = -1) {
  product(scratch, w, group, in, sums, next_group, [](int, float*) {});
}

}  // namespace
