// First half of a layer that keeps a state in place of keys and values: Gated DeltaNet. Methods of `Decoder`.
//
//   q, k, v = SiLU(conv(x W)), q and k over their lengths, q / sqrt(keys);  rate = sigmoid(b);
//   decay = exp(-exp(a_log) softplus(a + dt_bias));  the delta rule (`delta_rule.h`);  out = norm(o) SiLU(z)
//
// All of it is float32 until `out` is rounded. What a slot holds is in `delta_task.h`.
#pragma once
#include "step.h"

namespace {

template <class W> bool Decoder<W>::recur(const NativeLayer& l, Thread& t) {
  const int heads = l.delta->key_heads;
  return holdfast::tasks(t.run, step.num_sequences * heads,
                         [&](int i) { delta_head(l, t.own.delta, i / heads, i % heads); });
}

template <class W> void Decoder<W>::delta_head(const NativeLayer& l, DeltaRoom& room, int sequence, int head) {
  const NativeDeltaNet& net = *l.delta;
  const DeltaSizes sizes(net);
  const SequenceView& seq = attention.sequences[sequence];
  float* slot = l.states + step.state_slots[sequence] * l.state_length;
  float* states = slot + net.columns * sizes.row + head * sizes.of_head;
  const DeltaTask task = {net, sizes, seq, slot, states, projected.row(seq.first_row), projected.stride, head};
  room.make(net, sizes);
  if (!seq.first_position) memset(states, 0, sizes.of_head * sizeof(float));
  const int certain = task.end() - (int)step.num_drafts[sequence];
  for (int from = task.position_of_states(); from < task.end();) {
    const bool is_draft = from >= certain;
    const int count = std::min((int)DELTA_RUN, (is_draft ? task.end() : certain) - from);
    delta_run(l, room, task, from, count, is_draft);
    from += count;
  }
  keep_rows(task);
  memcpy(states, &certain, sizeof certain);
}

// Tokens [from, from + count) of a key head and its value heads. Drafts leave the states as they are.
template <class W>
void Decoder<W>::delta_run(const NativeLayer& l, DeltaRoom& room, const DeltaTask& task, int from, int count,
                           bool is_draft) {
  const NativeDeltaNet& net = task.net;
  const int keys = net.key_dim, filled = task.sizes.filled;
  delta_channels(task, task.queries(), keys, from, count, room.q.data, keys);
  delta_channels(task, task.keys(), keys, from, count, room.k.data, keys);
  for (int t = 0; t < count; t++) {
    unit_row(room.q.data + t * keys, keys, 1.0f / square_root((float)keys));
    unit_row(room.k.data + t * keys, keys, 1.0f);
  }
  const DeltaTokens tokens = {room.q.data, room.k.data,   room.v.data, room.decay,
                              room.rate,   room.out.data, filled,      keys,       count};
  for (int h = task.head * task.sizes.group; h < (task.head + 1) * task.sizes.group; h++) {
    delta_channels(task, task.values(h), net.value_dim, from, count, room.v.data, filled);
    delta_gates(task, h, from, count, room.decay, room.rate);
    for (int column = 0; column < filled; column += STATE_COLUMNS) {
      float* tile = task.state(h) + (long)column * keys;
      if (is_draft) tile = (float*)memcpy(room.tile.data, tile, (long)keys * STATE_COLUMNS * sizeof(float));
      delta_rule(tile, tokens, column);
    }
    for (int t = 0; t < count; t++)
      if (from + t >= task.seq.first_position) put_head(l, task, h, from + t, room.out.data + (long)t * filled);
  }
}

// The output of value head h at a position, as an input of the layer's output.
template <class W>
void Decoder<W>::put_head(const NativeLayer& l, const DeltaTask& task, int h, int position, const float* from) {
  const NativeDeltaNet& net = task.net;
  const long slice_length = (long)l.output.slice_tiles * K_TILE;
  Input* out = attention_out.row(task.seq.first_row + position - task.seq.first_position) +
               h / l.heads_per_slice * slice_length + h % l.heads_per_slice * net.value_dim;
  gated_norm(from, task.gate(position, h), net.norm.weight, net.norm.eps, net.value_dim,
             [&](int i, Lanes v) { store(out + i, v); });
}

}  // namespace
