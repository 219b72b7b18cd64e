// Low-rank adapters: what some rows of a step add to a linear, y += B (scale A x), by the adapter of each row.
//
// A row's inner numbers, scale A x, are one phase before the product; they are of each slice of the inputs apart, and what
// they add goes into that slice's sum, before slices are added as a tree: so ranks that hold whole slices give the same
// bits together. Of a slice the products with A are eight sums over every eighth input, added as a binary tree, and those
// with B are one sum over ranks in ascending order. A row's numbers depend on nothing but the row and its adapter.
#pragma once
#include "decoder.h"
#include "linear.h"
#include "rows.h"

namespace {

enum { A_SUMS = 8 };

// Of a product: which adapter each row has, and the inner numbers of all rows. Null pointers: no row has one.
struct AddedRows {
  const int* adapter_of = nullptr;          // [rows]; -1: none
  const NativeAdapter* adapters = nullptr;
  const float* inner = nullptr;             // [rows][stride]: [slices][ranks] each
  long stride = 0;
  int site = 0;                             // of the linear

  const NativeAdapted* of(int row) const {
    const int adapter = adapter_of[row];
    if (adapter < 0) return nullptr;
    const NativeAdapted& adapted = adapters[adapter].linears[site - 1];
    return adapted.ranks ? &adapted : nullptr;
  }
};

// out [ranks] = scale A x, of one slice of a row: x [length], length a multiple of 32. A: [ranks / 16][all inputs][16].
template <class W, class Input>
void inner_numbers(const NativeAdapted& adapted, const Input* x, long first, long length, long all_inputs, float* out) {
  for (int j = 0; j < adapted.ranks; j += 16) {
    const W* a = (const W*)adapted.a + (j * all_inputs + first * 16);
    Lanes sums[A_SUMS];
    for (int s = 0; s < A_SUMS; s++) sums[s] = zero();
    for (long k = 0; k < length; k += A_SUMS)
      for (int s = 0; s < A_SUMS; s++) sums[s] = fma(load(a + (k + s) * 16), all(element(x[k + s])), sums[s]);
    for (int apart = 1; apart < A_SUMS; apart *= 2)
      for (int s = 0; s < A_SUMS; s += 2 * apart) sums[s] = sums[s] + sums[s + apart];
    store(out + j, sums[0] * load(adapted.scales + j));
  }
}

// Adds to sums [count][64] of one group what the adapters of rows `first` onwards add in one slice.
template <class W> void add_adapted(const AddedRows& added, int first, int group, int slice, int count, float* sums) {
  for (int r = 0; r < count; r++) {
    const NativeAdapted* adapted = added.of(first + r);
    if (!adapted) continue;
    const float* inner = added.inner + (first + r) * added.stride + (long)slice * adapted->ranks;
    for (int c = 0; c < GROUP / 16; c++) {
      const NativeSpan& span = adapted->spans[group * (GROUP / 16) + c];
      const W* b = (const W*)adapted->b + span.place;
      Lanes sum = zero();
      for (int j = span.first; j < span.end; j++, b += 16) sum = fma(load(b), all(inner[j]), sum);
      float* to = sums + r * GROUP + c * 16;
      if (span.end > span.first) store(to, load(to) + sum);
    }
  }
}

}  // namespace
