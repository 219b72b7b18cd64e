// First half of a layer that keeps a state in place of keys and values, or beside them: Gated DeltaNet or Mamba2. Methods of
// `Decoder`.
//
//   q, k, v = SiLU(conv(x W)), of DeltaNet q and k over their lengths, q / sqrt(keys);
//   decay = exp(-exp(a_log) time), time = softplus(a + dt_bias);  the recurrence (`delta_rule.h`);
//   DeltaNet: rate = sigmoid(b);  out = norm(o) SiLU(z), normed over each head
//   Kimi: the same with a decay for each key, a and z from a second product, and out = norm(o) sigmoid(z)
//   Mamba2: rate = time;  out = norm(o SiLU(z)), normed over a group of heads, which several ranks may share
//
// All of it is float32 until `out` is rounded. What a slot holds is in `recurrence_task.h`.
#pragma once
#include "step.h"

namespace {

template <class W> bool Decoder<W>::recur(const NativeLayer& l, Thread& t) {
  const RecurrenceSizes sizes(*l.recurrence);
  return holdfast::tasks(t.run, step.num_sequences * sizes.units,
                         [&](int i) { recurrence_unit(l, t.own.recurrence, i / sizes.units, i % sizes.units); });
}

// Of a decay for each key: the gates of all keys and z, from the last outputs of the first product, behind those.
template <class W> bool Decoder<W>::project_gates(Thread& t, const NativeRecurrence& net) {
  const RecurrenceSizes sizes(net);
  const int inputs = sizes.channels + net.value_heads, outputs = inputs + net.gate_inputs;
  auto round_into = [&](Buffer<Input>& out, int r) {
    put_rounded(out.row(r), projected.row(r) + inputs, net.gate_inputs);
  };
  const bool for_itself = t.num_rows <= OWN_NORM_ROWS;  // as in `normed`
  Buffer<Input>& of_rows = for_itself ? t.own.query_rows : query_rows;
  if (for_itself)
    for (int r = 0; r < t.num_rows; r++) round_into(of_rows, r);
  else if (!row_tasks(t.run, t.num_rows, [&](int r) { round_into(of_rows, r); })) return false;
  return linear(t, net.gates, {of_rows.data, of_rows.stride}, t.num_rows,
                [&](int g, int first, int count, const float* sums) {
                  for (int r = 0; r < count; r++)
                    memcpy(projected.row(first + r) + outputs + g * GROUP, sums + r * GROUP, GROUP * sizeof(float));
                });
}

template <class W>
void Decoder<W>::recurrence_unit(const NativeLayer& l, RecurrenceRoom& room, int sequence, int unit) {
  const NativeRecurrence& net = *l.recurrence;
  const RecurrenceSizes sizes(net);
  const SequenceView& seq = attention.sequences[sequence];
  float* slot = l.states + step.state_slots[sequence] * l.state_length;
  float* states = slot + net.columns * sizes.row + unit * sizes.of_unit;
  const RecurrenceTask task = {net,
                               sizes,
                               seq,
                               slot + unit * sizes.unit_row,
                               states,
                               projected.row(seq.first_row),
                               projected.stride,
                               unit * sizes.heads};
  room.make(net, sizes);
  if (!seq.first_position) memset(states, 0, sizes.of_unit * sizeof(float));
  const int certain = task.end() - (int)step.num_drafts[sequence];
  for (int from = task.position_of_states(); from < task.end();) {
    const bool is_draft = from >= certain;
    const int count = std::min((int)RECURRENCE_RUN, (is_draft ? task.end() : certain) - from);
    recurrence_run(l, room, task, from, count, is_draft);
    from += count;
  }
  keep_rows(task);
  memcpy(states, &certain, sizeof certain);
}

// Tokens [from, from + count) of a unit. Drafts leave the states as they are.
template <class W>
void Decoder<W>::recurrence_run(const NativeLayer& l, RecurrenceRoom& room, const RecurrenceTask& task, int from,
                                int count, bool is_draft) {
  const NativeRecurrence& net = task.net;
  const int keys = net.key_dim, filled = task.sizes.filled;
  const bool by_key = net.gates.groups;
  convolved(task, task.queries(), keys, from, count, room.q.data, keys);
  convolved(task, task.keys(), keys, from, count, room.k.data, keys);
  for (int t = 0; t < count && !net.skip; t++) {
    unit_row(room.q.data + t * keys, keys, 1.0f / square_root((float)keys));
    unit_row(room.k.data + t * keys, keys, 1.0f);
  }
  for (int h = task.first; h < task.first + task.sizes.heads; h++) {
    const HeadTokens tokens = {room.q.data,
                               room.k.data,
                               room.faded.data,
                               room.v.data,
                               by_key ? room.decays.data : room.decay,
                               room.rate,
                               room.out.data,
                               filled,
                               keys,
                               count,
                               net.skip ? net.skip + h : nullptr};
    convolved(task, task.values(h), net.value_dim, from, count, room.v.data, filled);
    if (by_key) decays_of_keys(task, h, from, count, room.k.data, room.decays.data, room.faded.data, room.rate);
    else decays_and_rates(task, h, from, count, room.decay, room.rate);
    for (int column = 0; column < filled; column += STATE_COLUMNS) {
      float* tile = task.state(h) + (long)column * keys;
      if (is_draft) tile = (float*)memcpy(room.tile.data, tile, (long)keys * STATE_COLUMNS * sizeof(float));
      pass_tile(tile, tokens, column);
    }
    for (int t = 0; t < count; t++)
      if (from + t >= task.seq.first_position) put_head(l, task, h, from + t, room.out.data + (long)t * filled);
  }
}

// The output of value head h at a position: of DeltaNet as an input of the layer's output; of Mamba2 in place of z, until it
// is normed with other heads.
template <class W>
void Decoder<W>::put_head(const NativeLayer& l, const RecurrenceTask& task, int h, int position, const float* from) {
  const NativeRecurrence& net = task.net;
  float* z = task.z(position, h);
  if (net.skip) {
    for (int i = 0; i < net.value_dim; i += 16) store(z + i, load(from + i) * silu_of(load(z + i) * all(net.z_scale)));
    return;
  }
  Input* out = mixed_head(l, task.seq.first_row + position - task.seq.first_position, h);
  gated_norm(from, z, net.gates.groups, net.norm.weight, net.norm.eps, net.value_dim,
             [&](int i, Lanes v) { store(out + i, v); });
}

// Where value head h of a row goes among the inputs of the layer's output: in its slice, behind the heads of attention.
template <class W> typename Decoder<W>::Input* Decoder<W>::mixed_head(const NativeLayer& l, int row, int h) {
  const NativeRecurrence& net = *l.recurrence;
  const long slice_length = (long)l.output.slice_tiles * K_TILE, before = (long)l.heads_per_slice * l.head_dim;
  const int slice = h / net.heads_per_slice, within = h % net.heads_per_slice;
  return attention_out.row(row) + slice * slice_length + before + within * net.value_dim;
}

// --- the norm of Mamba2 ---

// Sums of squares of a row's gated outputs: of each group of heads, or of this rank's part of its only one. Heads are added
// one after the other in a slice of the layer's output, slices as a binary tree, whose upper part is that over ranks.
template <class W> int Decoder<W>::sums_of_groups(const NativeRecurrence& net, const float* gated, float* sums) {
  const int heads = std::min(net.norm_heads, net.heads_per_slice), parts = net.value_heads / heads;
  for (int p = 0; p < parts; p++) {
    float sum = 0.0f;
    for (int h = p * heads; h < (p + 1) * heads; h++) sum += sum_of_squares(gated + h * net.value_dim, net.value_dim);
    sums[p] = sum;
  }
  const int of_group = std::min(net.norm_heads / heads, parts), groups = parts / of_group;
  for (int g = 0; g < groups; g++) {
    float* part = sums + g * of_group;
    for (int apart = 1; apart < of_group; apart *= 2)
      for (int i = 0; i + apart < of_group; i += 2 * apart) part[i] += part[i + apart];
    sums[g] = part[0];
  }
  return groups;
}

template <class W> const float* Decoder<W>::gated_row(const NativeRecurrence& net, int row) const {
  const RecurrenceSizes sizes(net);
  return projected.row(row) + sizes.z;
}

// Of a norm that several ranks share: this rank's sums of squares of all rows go to the others, [rows][groups of the model].
template <class W> bool Decoder<W>::send_squares(const NativeLayer& l, Thread& t) {
  const NativeRecurrence& net = *l.recurrence;
  if (exchange) t.sum++;
  float* place = exchange ? exchange->own(t.sum) : y.data;
  return row_tasks(t.run, t.num_rows, [&](int r) {
    float sums[MAX_NORM_PARTS];
    sums_of_groups(net, gated_row(net, r), sums);
    float* out = place + r * y.stride;
    memset(out, 0, filled_to(net.norm_groups, 16) * sizeof(float));
    out[net.first_group] = sums[0];
  });
}

// All rows of Mamba2, normed and rounded, as inputs of the layer's output.
template <class W> bool Decoder<W>::norm_groups(const NativeLayer& l, Thread& t) {
  const NativeRecurrence& net = *l.recurrence;
  auto norm_row = [&](int r) {
    const float* gated = gated_row(net, r);
    float sums[MAX_NORM_PARTS];
    if (net.norm_heads && !shares_norm(l)) sums_of_groups(net, gated, sums);
    if (shares_norm(l)) {
      if (exchange) sum_over_ranks(t.sum, r, y.row(r), 0, net.norm_groups);
      sums[0] = y.row(r)[net.first_group];
    }
    for (int h = 0; h < net.value_heads; h++) {
      const int group = net.norm_heads ? h / net.norm_heads : 0;
      const float count = (float)(net.norm_heads * net.value_dim);
      const Lanes factor = all(net.norm_heads ? 1.0f / square_root(sums[group] / count + net.norm.eps) : 1.0f);
      const float *from = gated + h * net.value_dim, *weight = net.norm.weight + h * net.value_dim;
      Input* out = mixed_head(l, r, h);
      for (int i = 0; i < net.value_dim; i += 16) store(out + i, load(from + i) * factor * load(weight + i));
    }
  };
  return shares_norm(l) ? summed_tasks(t, t.num_rows, norm_row) : row_tasks(t.run, t.num_rows, norm_row);
}

}  // namespace
