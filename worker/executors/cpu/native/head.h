// Head of a step: final norm, logits, the largest of each row. Methods of `Decoder`.
// Ranks hold parts of the vocabulary, and meet in the exchange (`exchange.h`) or outside of it.
#pragma once
#include "step.h"

namespace {

// The weights of an output of the head, which is the embedding's table too.
template <class W> const W* Decoder<W>::head_row(int row, std::vector<W>& out) {
  const Packed<W> w = packed<W>(m.head);
  out.resize(w.row_length());
  if (w.units.is_there()) return row_of_units(w, row, out.data());
  alignas(64) W read[TILE];
  for (int k = 0; k < w.k_tiles(); k++) {
    const W* tile = tile_of(w, row / 16, k, read);
    for (int i = 0; i < K_TILE; i++) out[k * K_TILE + i] = tile[place<W>(i, row % 16)];
  }
  return out.data();
}

template <class W> bool Decoder<W>::head_part(Thread& t) {
  if (!end_layer(t, m.num_layers - 1)) return false;
  if (t.keeps_hidden && !row_tasks(t.run, t.num_rows, [&](int r) {
        memcpy(step.hidden + (long)r * m.hidden, row_of(t, r), m.hidden * sizeof(float));
      }))
    return false;
  const int num_drawn = t.num_wanted - t.num_pooled;
  if (t.num_pooled && !row_tasks(t.run, t.num_pooled, [&](int r) { keep_pooled(t, num_drawn + r, r); })) return false;
  if (!num_drawn) return true;
  if (!row_tasks(t.run, num_drawn,
                 [&](int r) { norm_or_copy(row_of(t, t.narrows ? r : step.wanted[r]), m.norm, h.row(r)); }))
    return false;
  if (!linear(t, m.head, {h.data, h.stride}, num_drawn, [&](int g, int first, int count, const float* sums) {
        for (int r = 0; r < count; r++) logits_of(g, first + r, sums + r * GROUP);
      }))
    return false;
  if (exchange && t.gathers) return gather_logits(t, num_drawn);
  t.sum++;
  if (!row_tasks(t.run, num_drawn,
                 [&](int r) { choose_best(r, exchange ? choices_of(m.exchange->rank, t.sum) : nullptr); }))
    return false;
  return !exchange || summed_tasks(t, num_drawn, [&](int r) { choose_among_ranks(t.sum, r); });
}

// The state of wanted row `wanted` behind the final norm, as row `r` of those that are pooled.
template <class W> void Decoder<W>::keep_pooled(const Thread& t, int wanted, int r) const {
  const float* from = row_of(t, t.narrows ? wanted : step.wanted[wanted]);
  float* to = step.pooled + r * ((m.hidden + 15L) / 16 * 16);
  if (m.norm.weight) norm_row(from, m.norm, m.hidden, to);
  else memcpy(to, from, m.hidden * sizeof(float));
}

template <class W> void Decoder<W>::logits_of(int g, int row, const float* sums) {
  alignas(64) float out[GROUP];
  Lanes reals[GROUP / 16] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)};
  int columns = std::min((int)GROUP, m.vocab_rows - g * GROUP), tokens = std::min(columns, num_tokens - g * GROUP);
  Lanes best = all(-INFINITY), broken = zero();
  for (int j = 0; j < columns; j += 16) {
    Lanes v = load(sums + j);
    if (m.head.bias) v = v + load(m.head.bias + g * GROUP + j);
    v = v * all(m.logit_scale);
    if (m.logit_softcap > 0) v = tanh_of(v * all(1.0f / m.logit_softcap)) * all(m.logit_softcap);
    store(out + j, v);
    reals[j / 16] = keep_range(v, 0, tokens - j, all(-INFINITY));
    best = larger(best, reals[j / 16]);
    broken = broken + keep_range(v - v, 0, tokens - j, zero());  // NaN where not finite
  }
  if (step.logits) memcpy(step.logits + (long)row * m.vocab_rows + g * GROUP, out, columns * 4);
  float value = largest_of(best), doubt = sum_of(broken);
  uint64_t largest = 0;  // a bit for each
  for (int j = 0; j < GROUP / 16; j++) largest |= (uint64_t)equal_lanes(reals[j], all(value)) << 16 * j;
  int at = doubt == 0.0f && tokens > 0 ? __builtin_ctzll(largest) : 0;
  if (step.block_best) step.block_best[(long)row * m.head.groups + g] = doubt == 0.0f ? value : NAN;
  if (step.block_mass) step.block_mass[(long)row * m.head.groups + g] = doubt == 0.0f ? block_mass(reals, value) : NAN;
  group_best.row(row)[g] = value, group_at.row(row)[g] = doubt == 0.0f ? g * GROUP + at : -1;
}

// A row's largest logit among those of one rank.
template <class W> typename Decoder<W>::Choice* Decoder<W>::choices_of(int rank, Exchange::Sum sum) const {
  return (Choice*)exchange->buffer(rank, sum);
}

// Of equal logits the first, over all ranks; none where those of any rank are not all finite.
template <class W> void Decoder<W>::choose_among_ranks(Exchange::Sum sum, int row) {
  Choice best = choices_of(0, sum)[row];
  for (int i = 1; i < m.tensor_parallel_size; i++) {
    Choice other = choices_of(i, sum)[row];
    if (other.token < 0 || (best.token >= 0 && other.value > best.value)) best = other;
  }
  step.best[row] = best.token;
}

// All ranks' logits, in pieces of what a buffer of the exchange holds.
template <class W> bool Decoder<W>::gather_logits(Thread& t, int num_rows) {
  long most = m.max_rows * y.stride, all = (long)num_rows * m.vocab_rows;
  for (long first = 0; first < all; first += most) {
    long count = std::min(most, all - first);
    int pieces = (int)((count + COPIED - 1) / COPIED);
    t.sum++;
    if (!holdfast::tasks(t.run, pieces, [&](int i) {
          long from = (long)i * COPIED;
          memcpy(exchange->own(t.sum) + from, step.logits + first + from,
                 std::min((long)COPIED, count - from) * sizeof(float));
        }))
      return false;
    if (!holdfast::tasks(t.run, pieces,
                         [&](int i) {
                           if (!exchange->meet(t.sum, t.own.peers)) return;
                           long from = (long)i * COPIED;
                           for (int rank = 0; rank < m.tensor_parallel_size; rank++)
                             place_logits(rank, exchange->buffer(rank, t.sum) + from, first + from,
                                          std::min((long)COPIED, count - from));
                         }) ||
        exchange->outcome())
      return false;
  }
  return true;
}
// `count` of a rank's logits [wanted][vocab rows], from `first` on, to their places among those of all.
template <class W> void Decoder<W>::place_logits(int rank, const float* from, long first, long count) {
  long before = (long)rank * m.vocab_rows, columns = std::min((long)m.vocab_rows, m.vocab_size - before);
  for (long end = first + count; first < end;) {
    long row = first / m.vocab_rows, column = first % m.vocab_rows, run = std::min(end - first, m.vocab_rows - column);
    if (column < columns)
      memcpy(step.all_logits + row * m.vocab_size + before + column, from,
             std::min(run, columns - column) * sizeof(float));
    from += run, first += run;
  }
}

// Of equal logits the first.
template <class W> void Decoder<W>::choose_best(int row, Choice* choices) {
  float value = -INFINITY;
  int at = num_tokens > 0 ? -1 : 0;
  for (int g = 0; g < m.head.groups && g * GROUP < num_tokens; g++) {
    if (group_at.row(row)[g] < 0) {
      at = -1;
      break;
    }
    if (group_best.row(row)[g] > value) value = group_best.row(row)[g], at = group_at.row(row)[g];
  }
  if (choices) choices[row] = {value, at < 0 ? at : at + m.first_vocab_row};
  else if (step.best) step.best[row] = at;
}

}  // namespace
