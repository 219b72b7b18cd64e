// First half of a layer that keeps a state: a short convolution, and what goes around it and recurrences (`recurrence.h`).
// Methods of `Decoder`.
//
//   s[t] = B[t] x[t];  out[t] = C[t] (bias + w[0] s[t - width + 1] + ... + w[width - 1] s[t]), by FMA, the oldest first
//
// A slot keeps s of the last tokens in float32, each at its position modulo `columns`: so tokens have the same bits however
// a prompt is cut, and a draft that turned out wrong is written over by the token that is right. `columns` is width - 1 and
// the most drafts of a step: the step after it finds what came before any of its drafts. A sequence's first token has zeros
// before it, whatever the slot holds.
#pragma once
#include "causal_conv.h"
#include "step.h"

namespace {

enum { CONV_RUN = 64 };  // channels that one task has at least

inline void put_some(float* to, Lanes v, int count) {
  if (count == 16) return store(to, v);
  alignas(64) float all[16];
  store(all, v);
  memcpy(to, all, count * sizeof(float));
}

template <class W> bool Decoder<W>::state_half(int index, Thread& t) {
  const NativeLayer& l = m.layers[index];
  const NativeLinear& inputs = l.conv ? l.conv->inputs : l.recurrence->inputs;
  Rows rows;
  if (!normed(t, l.attention_norm, rows)) return false;
  if (attends(l) && !(project(t, l.qkv, 0, l.qkv.groups, rows) && attend(l, attention.kinds[kind_of[index]], t)))
    return false;
  if (!project(t, inputs, 0, inputs.groups, rows)) return false;
  if (l.recurrence && l.recurrence->rates.groups &&
      !project(t, l.recurrence->rates, 0, l.recurrence->rates.groups, rows,
               RecurrenceSizes(*l.recurrence).before_rates))
    return false;
  if (l.recurrence && l.recurrence->gates.groups && !project_gates(t, *l.recurrence)) return false;
  if (!(l.conv ? convolve_all(l, t) : recur(l, t))) return false;
  if (shares_norm(l)) return send_squares(l, t);
  if (l.recurrence && l.recurrence->skip && !norm_groups(l, t)) return false;
  return mixed_out(index, t);
}

// The rest of the half, of a layer whose norm several ranks share.
template <class W> bool Decoder<W>::shared_norm_part(int index, Thread& t) {
  const NativeLayer& l = m.layers[index];
  return !shares_norm(l) || (norm_groups(l, t) && mixed_out(index, t));
}

template <class W> bool Decoder<W>::mixed_out(int index, Thread& t) {
  const NativeLayer& l = m.layers[index];
  Rows mixed = {attention_out.data, attention_out.stride};
  if (t.narrows && index == m.num_layers - 1 && !narrow_mixed(t, mixed)) return false;
  if (!t.num_rows) return true;
  return row_parallel(t, l.output, mixed, l, place_of_sum(t, l.attention_out_norm));
}

template <class W> bool Decoder<W>::convolve_all(const NativeLayer& l, Thread& t) {
  const int sequences = step.num_sequences, runs = (l.conv->channels + CONV_RUN - 1) / CONV_RUN;
  const int pieces = std::max(1, std::min(runs, 4 * threads / std::max(1, sequences)));
  const int each = (runs + pieces - 1) / pieces * CONV_RUN;
  return holdfast::tasks(t.run, sequences * pieces, [&](int task) {
    const int first = task % pieces * each;
    convolve(l, task / pieces, first, std::min(l.conv->channels, first + each));
  });
}

// Channels [first, end) of all tokens of a sequence.
template <class W> void Decoder<W>::convolve(const NativeLayer& l, int sequence, int first, int end) {
  const NativeShortConv& conv = *l.conv;
  const SequenceView& seq = attention.sequences[sequence];
  float* slot = l.states + step.state_slots[sequence] * l.state_length;
  const ConvWeights weights = {conv.kernel, conv.bias, conv.channels, conv.width};
  auto kept = [&](int position) { return slot + (long)(position % conv.columns) * conv.channels; };
  for (int c = first; c < end; c += 16) {
    const int count = std::min(16, end - c), last = seq.first_position + seq.num_tokens;
    auto own = [&](int position) { return projected.row(seq.first_row + position - seq.first_position) + c; };
    causal_conv(
        weights, c, seq.first_position, last,
        [&](int position) {
          if (position < seq.first_position) return load(kept(position) + c);
          return load(own(position)) * load(own(position) + 2 * conv.channels);
        },
        [&](int position, Lanes input, Lanes sum) {
          const int row = seq.first_row + position - seq.first_position;
          put_mixed(l, row, c, count, load(own(position) + conv.channels) * sum);
          if (last - position <= conv.columns) put_some(kept(position) + c, input, count);
        });
  }
}

// Channels [c, c + count) of a row of the output's inputs.
template <class W> void Decoder<W>::put_mixed(const NativeLayer& l, int row, int c, int count, Lanes v) {
  const int length = l.conv->channels / l.output.slices;
  put_in_slices(attention_out.row(row), length, l.output.slice_tiles * K_TILE, c, count, v);
}

// As `narrow`, once the states of all tokens are written: only the wanted rows go on.
template <class W> bool Decoder<W>::narrow_mixed(Thread& t, Rows& mixed) {
  if (!row_tasks(t.run, t.num_wanted, [&](int r) {
        memcpy((void*)wanted_mixed.row(r), attention_out.row(step.wanted[r]), attention_out.stride * sizeof(Input));
      }))
    return false;
  mixed = {wanted_mixed.data, wanted_mixed.stride};
  return narrow(t);
}

}  // namespace
