// The residual stream: the embedding begins it, and what halves of layers leave goes to it, summed over ranks, normed,
// scaled. Methods of `Decoder`.
#pragma once
#include "step.h"

namespace {

template <class W> bool Decoder<W>::embed(Thread& t) {
  t.sum++;
  if (!row_tasks(t.run, t.num_rows,
                 [&](int r) { embed_row(r, exchange ? exchange->own(t.sum) + r * y.stride : x.row(r)); }))
    return false;
  return !exchange || summed_tasks(t, t.num_rows, [&](int r) { sum_over_ranks(t.sum, r, x.row(r)); });
}

template <class W> void Decoder<W>::embed_row(int r, float* out) {
  int row = (int)step.token_ids[r] - m.first_vocab_row;
  bool mine = row >= 0 && row < m.vocab_rows;
  const W* vector = (const W*)m.embedding + (mine && m.embedding ? (long)row * m.hidden : 0);
  std::vector<W> of_head;
  if (!m.embedding) vector = head_row(mine ? row : 0, of_head);
  int i = 0;
  for (; i + 16 <= m.hidden; i += 16)
    store(out + i, mine ? load(vector + i) * all(m.embedding_scale) + zero() : zero());
  for (; i < m.hidden; i++) out[i] = mine ? element(vector[i]) * m.embedding_scale + 0.0f : 0.0f;
  if (mine) add_to_embedding(r, row, out);
  if (mine && m.positions) add_place(r, out);
}

// The positions of the step's rows in their prompts, and which of two texts they are of.
template <class W> void Decoder<W>::list_places() {
  places.clear();
  for (int i = 0; i < step.num_sequences; i++) {
    const SequenceView& seq = attention.sequences[i];
    const long second = step.second_starts ? step.second_starts[i] : 0;
    for (int t = 0; t < seq.num_tokens; t++) {
      const int position = seq.first_position + t;
      places.push_back({position, second && position >= second});
    }
  }
}

template <class W> void Decoder<W>::add_place(int r, float* out) const {
  const long stride = (m.hidden + 15) / 16 * 16;
  const float *position = m.positions + places[r].position * stride, *segment = m.segments + places[r].segment * stride;
  for (int i = 0; i < m.hidden; i += 16) store(out + i, load(out + i) + load(segment + i) + load(position + i));
}

template <class W>
inline bool Decoder<W>::row_parallel(Thread& t, const NativeLinear& w, Rows in, const NativeLayer& l, float* place) {
  return linear(t, w, in, t.num_rows, [&](int g, int first, int count, const float* sums) {
    for (int r = 0; r < count; r++)
      for (int j = 0; j < GROUP && g * GROUP + j < part_stride; j += 16)
        put(t, place, l, w, first + r, g * GROUP + j, load(sums + r * GROUP + j));
  });
}

// As `row_tasks`, once all ranks have written their rows of the latest sum. False also where a rank is lost: a late thread
// that hears of it too early gets no more tasks anyway.
template <class W> template <class Fn> inline bool Decoder<W>::summed_tasks(Thread& t, int rows, Fn&& fn) {
  if (!exchange) return row_tasks(t.run, rows, fn);
  return row_tasks(t.run, rows,
                   [&](int r) {
                     if (exchange->meet(t.sum, t.own.peers)) fn(r);
                   }) &&
         !exchange->outcome();
}

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
  const float* bias = is_attention ? l.output.bias : l.mlp.down.bias;
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
