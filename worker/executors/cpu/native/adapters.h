// Low-rank adapters: what some rows of a step add to a linear, y += B (scale A x), by the adapter of each row.
//
// A row's inner numbers, scale A x, are one phase before the product; they are of each slice of the inputs apart, and what
// they add goes into that slice's sum, before slices are added as a tree: so ranks that hold whole slices give the same
// bits together. Of a slice the products with A are eight sums over every eighth input, added as a binary tree, and those
// with B are one sum over ranks in ascending order. A row's numbers depend on nothing but the row and its adapter: rows with
// the same adapter are taken together, up to four, only so that its numbers are read once for them.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "decoder.h"
#include "linear.h"
#include "rows.h"

namespace {

enum { A_SUMS = 8, ROWS_TOGETHER = 4, AHEAD_BYTES = 2048 };

// Of a product: which adapter each row has, and the inner numbers of all rows. Null pointers: no row has one.
struct AddedRows {
  const int* adapter_of = nullptr;  // [rows]; -1: none
  const int* order = nullptr;       // [rows] rows: those of each `BLOCK_ROWS` by their adapter
  const NativeAdapter* adapters = nullptr;
  const float* inner = nullptr;  // [rows][stride]: [slices][ranks] each
  long stride = 0;
  int site = 0;  // of the linear

  const NativeAdapted* of(int row) const {
    const int adapter = adapter_of[row];
    if (adapter < 0) return nullptr;
    const NativeAdapted& adapted = adapters[adapter].linears[site - 1];
    return adapted.ranks ? &adapted : nullptr;
  }
  // Calls `fn(R, adapted, rows)` for the rows at places [first, end) of the order, R of them with the same adapter at a time.
  template <class Fn> void together(int first, int end, Fn&& fn) const {
    for (int i = first; i < end;) {
      int alike = 1;
      while (alike < ROWS_TOGETHER && i + alike < end && adapter_of[order[i + alike]] == adapter_of[order[i]]) alike++;
      const NativeAdapted* adapted = of(order[i]);
      if (!adapted) i += alike;
      else if (alike == ROWS_TOGETHER) fn(std::integral_constant<int, 4>(), *adapted, order + i), i += 4;
      else if (alike >= 2) fn(std::integral_constant<int, 2>(), *adapted, order + i), i += 2;
      else fn(std::integral_constant<int, 1>(), *adapted, order + i), i++;
    }
  }
};

inline void order_by_adapter(const int* adapter_of, int num_rows, int* order) {
  for (int first = 0; first < num_rows; first += BLOCK_ROWS) {
    const int end = std::min(num_rows, first + BLOCK_ROWS);
    for (int r = first; r < end; r++) order[r] = r;
    std::stable_sort(order + first, order + end, [&](int a, int b) { return adapter_of[a] < adapter_of[b]; });
  }
}

// out [R][ranks] = scale A x, of one slice of rows x [R][length], length a multiple of 32. A: [ranks / 16][all inputs][16].
// Some of the eight sums at a time, so that those of all rows are in registers.
template <int R, class W>
void inner_numbers(const NativeAdapted& adapted, const float* const* x, long first, long length, long all_inputs,
                   float* const* out) {
  const int AT_A_TIME = R == 4 ? A_SUMS / 2 : A_SUMS;
  for (int j = 0; j < adapted.ranks; j += 16) {
    const W* a = (const W*)adapted.a + (j * all_inputs + first * 16);
    Lanes sums[R][A_SUMS];
    for (int from = 0; from < A_SUMS; from += AT_A_TIME) {
      Lanes some[R][AT_A_TIME];
      NATIVE_UNROLL
      for (int r = 0; r < R; r++) NATIVE_UNROLL
      for (int s = 0; s < AT_A_TIME; s++) some[r][s] = zero();
      for (long k = from; k < length; k += A_SUMS) {
        NATIVE_UNROLL
        for (int s = 0; s < AT_A_TIME; s++) {
          if (s * sizeof(W) % 4 == 0) _mm_prefetch((const char*)(a + (k + s) * 16) + AHEAD_BYTES, _MM_HINT_T0);
          const Lanes numbers = load(a + (k + s) * 16);
          NATIVE_UNROLL
          for (int r = 0; r < R; r++) some[r][s] = fma(numbers, all(x[r][k + s]), some[r][s]);
        }
      }
      NATIVE_UNROLL
      for (int r = 0; r < R; r++) NATIVE_UNROLL
      for (int s = 0; s < AT_A_TIME; s++) sums[r][from + s] = some[r][s];
    }
    NATIVE_UNROLL
    for (int r = 0; r < R; r++) {
      NATIVE_UNROLL
      for (int apart = 1; apart < A_SUMS; apart *= 2) NATIVE_UNROLL
      for (int s = 0; s < A_SUMS; s += 2 * apart) sums[r][s] = sums[r][s] + sums[r][s + apart];
      store(out[r] + j, sums[r][0] * load(adapted.scales + j));
    }
  }
}

// As `inner_numbers`, of all slices of rows of a linear's inputs; `room`: memory of the thread.
template <int R, class W>
void inner_of(const NativeAdapted& adapted, const typename InputOf<W>::Type* const* rows, int slices, long length,
              std::vector<float>& room, float* const* out) {
  for (int i = 0; i < AHEAD_BYTES; i += 64) _mm_prefetch((const char*)adapted.a + i, _MM_HINT_T0);
  if (room.size() < size_t(R * length)) room.resize(R * length);
  for (int s = 0; s < slices; s++) {
    const float* x[R];
    float* to[R];
    for (int r = 0; r < R; r++) {
      const auto* from = rows[r] + s * length;
      if constexpr (std::is_same<typename InputOf<W>::Type, float>::value) {
        x[r] = from;
      } else {
        x[r] = room.data() + r * length;
        for (long k = 0; k < length; k += 16) store(room.data() + r * length + k, load(from + k));
      }
      to[r] = out[r] + s * adapted.ranks;
    }
    inner_numbers<R, W>(adapted, x, s * length, length, slices * length, to);
  }
}

// Adds to sums [R][16 N] what the ranks of N spans add, as many in each: `spans` are of neighbouring outputs.
template <int R, int N, class W>
NATIVE_INLINE void add_spans(const W* numbers, const NativeSpan* spans, const float* const* inner, float* const* sums) {
  const int count = spans[0].end - spans[0].first;
  Lanes sum[R][N];
  NATIVE_UNROLL
  for (int r = 0; r < R; r++) NATIVE_UNROLL
  for (int c = 0; c < N; c++) sum[r][c] = zero();
  for (int j = 0; j < count; j++) NATIVE_UNROLL
  for (int c = 0; c < N; c++) {
    const Lanes b = load(numbers + spans[c].place + j * 16);
    NATIVE_UNROLL
    for (int r = 0; r < R; r++) sum[r][c] = fma(b, all(inner[r][spans[c].first + j]), sum[r][c]);
  }
  NATIVE_UNROLL
  for (int r = 0; r < R; r++) NATIVE_UNROLL
  for (int c = 0; c < N; c++)
    if (count) store(sums[r] + c * 16, load(sums[r] + c * 16) + sum[r][c]);
}

// Adds to sums [count][64] of one group what the adapters of rows `first` onwards add in one slice.
template <class W> void add_adapted(const AddedRows& added, int first, int group, int slice, int count, float* sums) {
  added.together(first, first + count, [&](auto rows_together, const NativeAdapted& adapted, const int* rows) {
    const int R = decltype(rows_together)::value, N = GROUP / 16;
    const NativeSpan* spans = adapted.spans + group * N;
    const float* inner[R];
    float* to[R];
    for (int r = 0; r < R; r++) {
      inner[r] = added.inner + rows[r] * added.stride + (long)slice * adapted.ranks;
      to[r] = sums + (rows[r] - first) * GROUP;
    }
    bool are_alike = true;
    for (int c = 1; c < N; c++) are_alike &= spans[c].end - spans[c].first == spans[0].end - spans[0].first;
    if (are_alike) return add_spans<R, N, W>((const W*)adapted.b, spans, inner, to);
    for (int c = 0; c < N; c++) {
      add_spans<R, 1, W>((const W*)adapted.b, spans + c, inner, to);
      for (int r = 0; r < R; r++) to[r] += 16;
    }
  });
}

// Puts aside what `add_adapted` will read of a group.
template <class W> void fetch_adapted(const AddedRows& added, int first, int group, int count, Aside& aside) {
  const NativeAdapted* last = nullptr;
  added.together(first, first + count, [&](auto, const NativeAdapted& adapted, const int*) {
    if (&adapted == last) return;
    last = &adapted;
    const NativeSpan *spans = adapted.spans + group * (GROUP / 16), &end = spans[GROUP / 16 - 1];
    _mm_prefetch((const char*)(spans + GROUP / 16), _MM_HINT_T0);
    aside.add((const W*)adapted.b + spans->place,
              (end.place - spans->place + (end.end - end.first) * 16) * (long)sizeof(W));
  });
}

// out [groups * 64] = scale B A x of one row, with the same products as in a step; slices are added one after the other.
template <class W>
void added_alone(const NativeAdapted& adapted, const void* row, int slices, long length, int groups, float* out) {
  std::vector<float> room, inner((size_t)slices * adapted.ranks);
  const auto* rows = (const typename InputOf<W>::Type*)row;
  float* to = inner.data();
  inner_of<1, W>(adapted, &rows, slices, length, room, &to);
  const int none = 0;
  const NativeAdapter adapter = {&adapted};
  const AddedRows added = {&none, &none, &adapter, to, 0, 1};
  std::fill(out, out + groups * GROUP, 0.0f);
  for (int g = 0; g < groups; g++)
    for (int s = 0; s < slices; s++) add_adapted<W>(added, 0, g, s, 1, out + g * GROUP);
}

}  // namespace
