// What Gated DeltaNet keeps of a sequence, and the inputs of its recurrence, for one key head (`delta_net.h`).
//
// A slot holds, for each layer,
//   [columns][a row of inputs: q, k, v before the convolution, b, a, filled up to 16], each at its position modulo
//   `columns`,
//   [key heads]: the position of its states (one number of 16), and the states of its value heads as tiles.
// The states are those behind the last token that was no draft. Rows are kept for as many tokens as a step has drafts at
// most, and the convolution's window before them: the next step applies the drafts that were right again, from these rows,
// before its own tokens; its own drafts pass copies of tiles. So nothing is ever taken back, and a slot is all there is.
#pragma once
#include <algorithm>

#include "attention.h"
#include "causal_conv.h"
#include "delta_rule.h"
#include "rows.h"

namespace {

enum { DELTA_RUN = 64, STATE_HEADER = 16 };  // DELTA_RUN: tokens that pass a tile together

HF_INLINE long filled_to(long n, long step) { return (n + step - 1) / step * step; }

// Sizes of what a rank keeps; as `GatedDeltaNet.state_length` has them.
struct DeltaSizes {
  int group, channels, filled;  // filled: columns of a head's states
  long row, head_states, of_head;
  explicit DeltaSizes(const NativeDeltaNet& net)
      : group(net.value_heads / net.key_heads),
        channels(2 * net.key_heads * net.key_dim + net.value_heads * net.value_dim),
        filled((int)filled_to(net.value_dim, STATE_COLUMNS)),
        row(filled_to(channels + 2 * net.value_heads, 16)),
        head_states((long)net.key_dim * filled),
        of_head(STATE_HEADER + group * head_states) {}
};

// What a thread needs for a run of tokens of one head.
struct DeltaRoom {
  Buffer<float> q, k, v, out, tile;
  float decay[DELTA_RUN], rate[DELTA_RUN];
  void make(const NativeDeltaNet& net, const DeltaSizes& sizes) {
    if (q.data) return;
    q = Buffer<float>(1, DELTA_RUN * net.key_dim), k = Buffer<float>(1, DELTA_RUN * net.key_dim);
    v = Buffer<float>(1, DELTA_RUN * sizes.filled), out = Buffer<float>(1, DELTA_RUN * sizes.filled);
    tile = Buffer<float>(1, (long)net.key_dim * STATE_COLUMNS);
  }
};

// The tokens of one sequence for one key head, and where their inputs are.
struct DeltaTask {
  const NativeDeltaNet& net;
  const DeltaSizes sizes;
  const SequenceView& seq;
  float *rows, *states;  // of its slot: all rows, and the header of this key head's states
  const float* projected;
  long projected_stride;
  int head;

  int end() const { return seq.first_position + seq.num_tokens; }
  float* kept(int position) const { return rows + position % net.columns * sizes.row; }
  const float* input(int position) const {
    return position < seq.first_position ? kept(position) : own(position);
  }
  const float* own(int position) const { return projected + (position - seq.first_position) * projected_stride; }
  // Where channels begin in a row: of this head's queries and keys, and of value head h.
  int queries() const { return head * net.key_dim; }
  int keys() const { return (net.key_heads + head) * net.key_dim; }
  int values(int h) const { return 2 * net.key_heads * net.key_dim + h * net.value_dim; }
  const float* gate(int position, int h) const {
    return own(position) + sizes.channels + 2 * net.value_heads + h * net.value_dim;
  }
  float* state(int h) const { return states + STATE_HEADER + (h - head * sizes.group) * sizes.head_states; }
  int position_of_states() const {
    int position;
    memcpy(&position, states, sizeof position);
    return position;
  }
};

// Channels [first, first + n) of tokens [from, from + count), after convolution and SiLU: out [count][stride].
HF_INLINE void delta_channels(const DeltaTask& task, int first, int n, int from, int count, float* out, long stride) {
  const ConvWeights conv = {task.net.kernel, nullptr, task.sizes.channels, task.net.width};
  for (int c = 0; c < n; c += 16)
    causal_conv(conv, first + c, from, from + count, [&](int position) { return load(task.input(position) + first + c); },
                [&](int position, Lanes, Lanes sum) { store(out + (position - from) * stride + c, silu_of(sum)); });
}

// Decays and rates of value head h.
HF_INLINE void delta_gates(const DeltaTask& task, int h, int from, int count, float* decay, float* rate) {
  const NativeDeltaNet& net = task.net;
  const Lanes strength = zero() - exp_of(all(net.a_log[h])), bias = all(net.dt_bias[h]);
  for (int t = 0; t < count; t += 16) {
    alignas(64) float a[16] = {}, b[16] = {};
    for (int i = 0; i < 16 && t + i < count; i++) {
      const float* gates = task.input(from + t + i) + task.sizes.channels;
      b[i] = gates[h], a[i] = gates[net.value_heads + h];
    }
    store(decay + t, exp_of(strength * softplus_of(load(a) + bias))), store(rate + t, sigmoid_of(load(b)));
  }
}

// The rows that a later step may need, of this head's channels.
inline void keep_rows(const DeltaTask& task) {
  const NativeDeltaNet& net = task.net;
  const int group = task.sizes.group, first_value = task.head * group, gates = task.sizes.channels;
  for (int p = std::max(task.seq.first_position, task.end() - net.columns); p < task.end(); p++) {
    auto keep = [&](int at, int n) { memcpy(task.kept(p) + at, task.own(p) + at, n * sizeof(float)); };
    keep(task.queries(), net.key_dim), keep(task.keys(), net.key_dim);
    keep(task.values(first_value), group * net.value_dim);
    keep(gates + first_value, group), keep(gates + net.value_heads + first_value, group);
  }
}

}  // namespace
