// What halves of layers leave goes to the residual stream: summed over ranks, normed, scaled. Methods of `Decoder`.
#pragma once
#include "step.h"

namespace {

// Ranks hold neighbouring subtrees of the tree over slices: theirs are added as its upper part.
// `first`: the column where they begin; `columns`: how many there are, 0 for all of the residual stream.
template <class W>
void Decoder<W>::sum_over_ranks(Exchange::Sum sum, int row, float* out, long first, int columns) const {
  int ranks = m.tensor_parallel_size;
  const float* parts[Exchange::kMostRanks];
  if (!columns) columns = m.hidden;
  for (int i = 0; i < ranks; i++) parts[i] = exchange->buffer(i, sum) + row * y.stride + first;
  for (int j = 0; j < columns; j += 16) {
    Lanes v[Exchange::kMostRanks];
    for (int i = 0; i < ranks; i++) v[i] = tail_of(parts[i] + j, columns - j);
    for (int apart = 1; apart < ranks; apart *= 2)
      for (int i = 0; i + apart < ranks; i += 2 * apart) v[i] = v[i] + v[i + apart];
    store(out + j, v[0]);
  }
}

// What a half of a layer left goes to the residual: in `y`, summed over ranks by now, or with all ranks.
template <class W> bool Decoder<W>::finish(Thread& t, const NativeLayer& l, bool is_attention) {
  const NativeNorm& norm = is_attention ? l.attention_out_norm : l.mlp_out_norm;
  if (is_direct(norm) || !(is_attention ? mixes(l) : feeds(l))) return true;
  const float* bias = is_attention ? l.output.bias : l.experts && !l.beside ? nullptr : l.mlp.down.bias;
  const bool two = !is_attention && l.beside, scales = !is_attention && !l.input && l.output_scale != 1.0f;
  return summed_tasks(t, t.num_rows, [&](int r) {
    float* sums = y.row(r);
    if (exchange) sum_over_ranks(t.sum, r, sums);
    if (bias)
      for (int j = 0; j < m.hidden; j += 16) store(sums + j, load(sums + j) + load(bias + j));
    if (two) add_beside(t, *l.beside, r, sums);
    if (norm.weight) norm_row(sums, norm, m.hidden, sums);
    for (int j = 0; j < m.hidden; j += 16) put_residual(t, l, r, j, tail_of(sums + j, m.hidden - j));
    if (scales) scale_residual(t, l, r);
  });
}

// What is left to do of a layer behind its MLP.
template <class W> bool Decoder<W>::end_layer(Thread& t, int index) {
  return finish(t, m.layers[index], false) && (!m.layers[index].input || !t.num_rows || add_input(index, t));
}

// Norms what an MLP has left, and adds the normed sums of the mixture beside it.
template <class W> void Decoder<W>::add_beside(Thread& t, const NativeBeside& beside, int row, float* sums) {
  float* others = sums + part_stride;
  if (exchange) sum_over_ranks(t.sum, row, others, part_stride);
  norm_row(sums, beside.mlp_out_norm, m.hidden, sums), norm_row(others, beside.out_norm, m.hidden, others);
  for (int j = 0; j < m.hidden; j += 16) store(sums + j, load(sums + j) + load(others + j));
}

template <class W> void Decoder<W>::scale_residual(const Thread& t, const NativeLayer& l, int row) {
  float* to = row_of(t, row);
  for (int j = 0; j < m.hidden; j += 16) store(to + j, load(to + j) * all(l.output_scale));
}

}  // namespace
