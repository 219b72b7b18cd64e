// Low-rank adapters: what some rows of a step add to a linear, y += B (scale A x), by the adapter of each row.
//
// A row's inner numbers, scale A x, are one phase before the product; they are of each slice of the inputs apart, and what
// they add goes into that slice's sum, before slices are added as a tree: so ranks that hold whole slices give the same
// bits together. Of a slice the products with A are eight sums over every eighth input, added as a binary tree, and those
// with B are one sum over ranks in ascending order. A row's numbers depend on nothing but the row and its adapter.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "added_rows.h"
#include "linear.h"

namespace {

// `PIECE_INPUTS`: of a row, before another row's turn comes: so the memory of as many adapters is read at the same
// time, which is faster than one after the other. `RUNS_AHEAD`: of B, whose lines a processor forgets some of when many
// are asked for, runs that are asked for once more.
enum { A_SUMS = 8, PIECE_INPUTS = 64, AHEAD_BYTES = 2048, RUNS_AHEAD = 6 };

// sums [R][eight] += A [count][16] times inputs x [R][count], a multiple of 32. Some of the eight sums at a time, so
// that those of all rows are in registers.
template <int R, class W>
NATIVE_INLINE void add_inputs(const W* a, const typename InputOf<W>::Type* const* x, long count,
                              Lanes (*sums)[A_SUMS]) {
  const int AT_A_TIME = R == 4 ? A_SUMS / 2 : A_SUMS;
  alignas(64) float inputs[R][PIECE_INPUTS];
  for (int r = 0; r < R; r++)
    for (long k = 0; k < count; k += 16) store(inputs[r] + k, load(x[r] + k));
  for (int from = 0; from < A_SUMS; from += AT_A_TIME) {
    Lanes some[R][AT_A_TIME];
    NATIVE_UNROLL
    for (int r = 0; r < R; r++) NATIVE_UNROLL
    for (int s = 0; s < AT_A_TIME; s++) some[r][s] = sums[r][from + s];
    for (long k = from; k < count; k += A_SUMS) {
      NATIVE_UNROLL
      for (int s = 0; s < AT_A_TIME; s++) {
        if (s * sizeof(W) % 4 == 0) _mm_prefetch((const char*)(a + (k + s) * 16) + AHEAD_BYTES, _MM_HINT_T0);
        const Lanes numbers = load(a + (k + s) * 16);
        NATIVE_UNROLL
        for (int r = 0; r < R; r++) some[r][s] = fma(numbers, all(inputs[r][k + s]), some[r][s]);
      }
    }
    NATIVE_UNROLL
    for (int r = 0; r < R; r++) NATIVE_UNROLL
    for (int s = 0; s < AT_A_TIME; s++) sums[r][from + s] = some[r][s];
  }
}

// The eight sums, added.
NATIVE_INLINE Lanes sum_of_eight(const Lanes* sums) {
  Lanes each[A_SUMS];
  NATIVE_UNROLL
  for (int s = 0; s < A_SUMS; s++) each[s] = sums[s];
  NATIVE_UNROLL
  for (int apart = 1; apart < A_SUMS; apart *= 2) NATIVE_UNROLL
  for (int s = 0; s < A_SUMS; s += 2 * apart) each[s] = each[s] + each[s + apart];
  return each[0];
}

// Rows of a linear's inputs, and how they are cut.
template <class W> struct CutRows {
  const typename InputOf<W>::Type* data;
  long stride;
  int slices;
  long length;  // of a slice, a multiple of 32
};

// The inner numbers of 16 ranks, from `rank` on, of runs that are up to four rows: of one slice.
template <class W>
void inner_numbers(const AddedRows& added, const std::vector<AddedRun>& runs, const CutRows<W>& in, int slice,
                   int rank) {
  Lanes sums[ROWS_TOGETHER][A_SUMS];
  for (auto& of_row : sums)
    for (auto& sum : of_row) sum = zero();
  const long first = slice * in.length, before = rank * (in.slices * in.length) + first * 16;
  for (long k = 0; k < in.length; k += PIECE_INPUTS) {
    Lanes(*of_run)[A_SUMS] = sums;
    for (const AddedRun& run : runs) {
      if (rank < run.adapted.ranks)
        with_count(run.count, [&](auto count) {
          const typename InputOf<W>::Type* x[count()];
          for (int r = 0; r < count(); r++) x[r] = in.data + run.rows[r] * in.stride + first + k;
          add_inputs<count(), W>((const W*)run.adapted.a + before + k * 16, x,
                                 std::min<long>(PIECE_INPUTS, in.length - k), of_run);
        });
      of_run += run.count;
    }
  }
  const Lanes(*of_row)[A_SUMS] = sums;
  for (const AddedRun& run : runs)
    for (int r = 0; r < run.count; r++, of_row++)
      if (rank < run.adapted.ranks)
        store(added.inner + run.rows[r] * added.stride + slice * run.adapted.ranks + rank,
              sum_of_eight(*of_row) * load(run.adapted.scales + rank));
}

// scale A x, of all slices of the rows at up to four places of the order from `place` on.
template <class W> void inner_of(const AddedRows& added, const CutRows<W>& in, int place, int end) {
  int most = 0;
  const std::vector<AddedRun>& runs = added.runs_of(place, end);
  for (const AddedRun& run : runs) {
    for (int i = 0; i < AHEAD_BYTES; i += 64) _mm_prefetch((const char*)run.adapted.a + i, _MM_HINT_T0);
    _mm_prefetch((const char*)run.adapted.scales, _MM_HINT_T0);
    most = std::max(most, run.adapted.ranks);
  }
  for (int slice = 0; slice < in.slices; slice++)
    for (int rank = 0; rank < most; rank += 16) inner_numbers<W>(added, runs, in, slice, rank);
}

// Adds to sums [R][16 N] what the ranks of N spans add, as many in each: `spans` are of neighbouring outputs, and
// `ALIKE` neighbours have the same ranks.
template <int R, int N, int ALIKE, class W>
NATIVE_INLINE void add_spans(const W* numbers, const NativeSpan* spans, const float* const* inner, float* const* sums) {
  const int count = spans[0].end - spans[0].first;
  const W* b[N];
  Lanes sum[R][N];
  NATIVE_UNROLL
  for (int c = 0; c < N; c++) b[c] = numbers + spans[c].place;
  NATIVE_UNROLL
  for (int r = 0; r < R; r++) NATIVE_UNROLL
  for (int c = 0; c < N; c++) sum[r][c] = zero();
  for (int j = 0; j < count; j++) NATIVE_UNROLL
  for (int alike = 0; alike < N; alike += ALIKE) {
    Lanes of_rank[R];
    NATIVE_UNROLL
    for (int r = 0; r < R; r++) of_rank[r] = all(inner[r][spans[alike].first + j]);
    NATIVE_UNROLL
    for (int c = alike; c < alike + ALIKE; c++) {
      const Lanes some = load(b[c] + j * 16);
      NATIVE_UNROLL
      for (int r = 0; r < R; r++) sum[r][c] = fma(some, of_rank[r], sum[r][c]);
    }
  }
  NATIVE_UNROLL
  for (int r = 0; r < R; r++) NATIVE_UNROLL
  for (int c = 0; c < N; c++)
    if (count) store(sums[r] + c * 16, load(sums[r] + c * 16) + sum[r][c]);
}

// How many neighbours of a group's spans have the same ranks: all, each two, or 1; 0: not even their number is the
// same.
inline int alike_spans(const NativeSpan* spans) {
  const int N = GROUP / 16;
  for (int c = 1; c < N; c++)
    if (spans[c].end - spans[c].first != spans[0].end - spans[0].first) return 0;
  if (spans[0].first != spans[1].first || spans[2].first != spans[3].first) return 1;
  return spans[0].first == spans[2].first ? N : 2;
}

// What a run has of B for one group.
template <class W> struct GroupOfB {
  const char* first;
  long bytes;
  GroupOfB(const AddedRun& run, int group) {
    const NativeSpan *spans = run.adapted.spans + group * (GROUP / 16), &end = spans[GROUP / 16 - 1];
    first = (const char*)((const W*)run.adapted.b + spans->place);
    bytes = (end.place - spans->place + (end.end - end.first) * 16) * (long)sizeof(W);
  }
};

// Adds to sums [R][64] of one group what a run adds in one slice; `alike` as `alike_spans` says.
template <int R, class W>
NATIVE_INLINE void add_run(const AddedRows& added, const AddedRun& run, const NativeSpan* spans, int alike, int slice,
                           float* const* sums) {
  const int N = GROUP / 16;
  const W* b = (const W*)run.adapted.b;
  const float* inner[R];
  float* to[R];
  for (int r = 0; r < R; r++)
    inner[r] = added.inner + run.rows[r] * added.stride + (long)slice * run.adapted.ranks, to[r] = sums[r];
  if (alike == N) return add_spans<R, N, N>(b, spans, inner, to);
  if (alike == 2) return add_spans<R, N, 2>(b, spans, inner, to);
  for (int c = 0; c < N; c++) {
    add_spans<R, 1, 1>(b, spans + c, inner, to);
    for (int r = 0; r < R; r++) to[r] += 16;
  }
}

// Adds to sums [count][64] of one group what the adapters of rows `first` onwards add in one slice.
template <class W> void add_adapted(const AddedRows& added, int first, int group, int slice, int count, float* sums) {
  const std::vector<AddedRun>& runs = added.runs_of(first, first + count);
  const NativeSpan* last = nullptr;
  int alike = 0;
  for (size_t i = 0; i < runs.size(); i++) {
    if (i + RUNS_AHEAD < runs.size()) {
      const GroupOfB<W> later(runs[i + RUNS_AHEAD], group);
      for (long line = 0; line < later.bytes; line += 64) _mm_prefetch(later.first + line, _MM_HINT_T0);
    }
    const NativeSpan* spans = runs[i].adapted.spans + group * (GROUP / 16);
    if (spans != last) last = spans, alike = alike_spans(spans);
    with_count(runs[i].count, [&](auto rows_together) {
      float* to[rows_together()];
      for (int r = 0; r < rows_together(); r++) to[r] = sums + (runs[i].rows[r] - first) * GROUP;
      add_run<rows_together(), W>(added, runs[i], spans, alike, slice, to);
    });
  }
}

// Puts aside what `add_adapted` will read of a group.
template <class W> void fetch_adapted(const AddedRows& added, int first, int group, int count, Aside& aside) {
  const void* last = nullptr;
  for (const AddedRun& run : added.runs_of(first, first + count)) {
    if (run.adapted.b == last) continue;
    last = run.adapted.b;
    _mm_prefetch((const char*)(run.adapted.spans + (group + 1) * (GROUP / 16)), _MM_HINT_T0);
    const GroupOfB<W> whole(run, group);
    aside.add(whole.first, whole.bytes);
  }
}

// out [groups * 64] = scale B A x of one row, with the same products as in a step; slices are added one after the other.
template <class W>
void added_alone(const NativeAdapted& adapted, const void* row, int slices, long length, int groups, float* out) {
  std::vector<float> inner((size_t)slices * adapted.ranks);
  const int none = 0;
  AddedRuns runs;
  const AddedRows added = {&none, &none, &adapted, inner.data(), 0, &runs};
  inner_of<W>(added, {(const typename InputOf<W>::Type*)row, 0, slices, length}, 0, 1);
  std::fill(out, out + groups * GROUP, 0.0f);
  for (int g = 0; g < groups; g++)
    for (int s = 0; s < slices; s++) add_adapted<W>(added, 0, g, s, 1, out + g * GROUP);
}

}  // namespace
