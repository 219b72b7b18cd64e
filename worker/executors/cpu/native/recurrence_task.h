// What a recurrence keeps of a sequence, and its inputs, for one unit: some value heads that share a key head
// (`recurrence.h`). Of Gated DeltaNet a unit is a key head with all its value heads; of Mamba2 a few heads of a group, whose
// C and B are queries and keys.
//
// A slot holds, for each layer,
//   [columns][units][a row of inputs: q, k, v before the convolution, gates; all of them filled up to 16], each at its
//   position modulo `columns`,
//   [units]: the position of its states (one number of 16), and the states of its value heads as tiles.
// The states are those behind the last token that was no draft. Rows are kept for as many tokens as a step has drafts at
// most, and the convolution's window before them: the next step applies the drafts that were right again, from these rows,
// before its own tokens; its own drafts pass copies of tiles. So nothing is ever taken back, and a slot is all there is.
// Units share no number of a slot: they may run at the same time.
#pragma once
#include <algorithm>

#include "attention.h"
#include "causal_conv.h"
#include "delta_rule.h"
#include "rows.h"

namespace {

enum { RECURRENCE_RUN = 64, STATE_HEADER = 16 };  // RECURRENCE_RUN: tokens that pass a tile together

NATIVE_INLINE long filled_to(long n, long step) { return (n + step - 1) / step * step; }

// Sizes of what a rank keeps; as `recurrence_state_length` has them.
struct RecurrenceSizes {
  int heads, units, channels, filled, gates;  // heads: of a unit; filled: columns of a head's states; gates: of a head
  long z, before_rates;                       // of a token's projections: where z begins, and where b or dt do
  long unit_row, row, head_states, of_unit;
  explicit RecurrenceSizes(const NativeRecurrence& net)
      : heads(net.unit_heads),
        units(net.value_heads / net.unit_heads),
        channels(2 * net.key_heads * net.key_dim + net.value_heads * net.value_dim),
        filled((int)filled_to(net.value_dim, STATE_COLUMNS)),
        gates(net.skip           ? 1
              : net.gates.groups ? 1 + net.key_dim
                                 : 2),
        z(net.gates.groups ? channels + net.gate_inputs + (long)gates * net.value_heads : channels),
        before_rates(net.gates.groups ? channels : channels + (long)net.value_heads * net.value_dim),
        unit_row(2 * net.key_dim + (long)heads * (net.value_dim + gates)),
        row(filled_to(units * unit_row, 16)),
        head_states((long)net.key_dim * filled),
        of_unit(STATE_HEADER + heads * head_states) {}
};

// What a thread needs for a run of tokens of one unit.
struct RecurrenceRoom {
  Buffer<float> q, k, v, out, tile, decays, faded;  // the last two of a decay for each key
  float decay[RECURRENCE_RUN], rate[RECURRENCE_RUN];
  long keys = 0, values = 0, decaying = 0;
  void make(const NativeRecurrence& net, const RecurrenceSizes& sizes) {
    if (net.gates.groups && net.key_dim > decaying) {
      decaying = net.key_dim;
      decays = Buffer<float>(1, RECURRENCE_RUN * decaying), faded = Buffer<float>(1, RECURRENCE_RUN * decaying);
    }
    if (net.key_dim <= keys && sizes.filled <= values) return;
    keys = std::max(keys, (long)net.key_dim), values = std::max(values, (long)sizes.filled);
    q = Buffer<float>(1, RECURRENCE_RUN * keys), k = Buffer<float>(1, RECURRENCE_RUN * keys);
    v = Buffer<float>(1, RECURRENCE_RUN * values), out = Buffer<float>(1, RECURRENCE_RUN * values);
    tile = Buffer<float>(1, keys * STATE_COLUMNS);
  }
};

// Where numbers of a token begin: among the outputs of the layer's first product, and in a kept row of the unit.
struct InputPlace {
  long own, kept;
};

// The tokens of one sequence for one unit, and where their inputs are.
struct RecurrenceTask {
  const NativeRecurrence& net;
  const RecurrenceSizes sizes;
  const SequenceView& seq;
  float *rows, *states;  // of its slot: the rows of this unit, and the header of its states
  float* projected;
  long projected_stride;
  int first;  // of its value heads

  int end() const { return seq.first_position + seq.num_tokens; }
  float* kept(int position) const { return rows + position % net.columns * sizes.row; }
  float* own(int position) const { return projected + (position - seq.first_position) * projected_stride; }
  const float* input(int position, InputPlace at) const {
    return position < seq.first_position ? kept(position) + at.kept : own(position) + at.own;
  }
  int key_head() const { return first / (net.value_heads / net.key_heads); }
  InputPlace queries() const { return {(long)key_head() * net.key_dim, 0}; }
  InputPlace keys() const { return {(long)(net.key_heads + key_head()) * net.key_dim, net.key_dim}; }
  InputPlace values(int h) const {
    return {2L * net.key_heads * net.key_dim + h * net.value_dim, 2L * net.key_dim + (h - first) * net.value_dim};
  }
  InputPlace gates(int which, int h) const {
    return {sizes.before_rates + (long)which * net.value_heads + h,
            2L * net.key_dim + sizes.heads * (net.value_dim + which) + h - first};
  }
  InputPlace gates_of_keys(int h) const {
    return {sizes.channels + net.value_heads + net.gate_inputs + (long)h * net.key_dim,
            2L * net.key_dim + sizes.heads * (net.value_dim + 1) + (long)(h - first) * net.key_dim};
  }
  float* z(int position, int h) const { return own(position) + sizes.z + h * net.value_dim; }
  float* state(int h) const { return states + STATE_HEADER + (h - first) * sizes.head_states; }
  int position_of_states() const {
    int position;
    memcpy(&position, states, sizeof position);
    return position;
  }
};

// Channels [0, n) at `at` of tokens [from, from + count), after convolution and SiLU: out [count][stride]. Tokens lie pages
// apart, so no machine foresees the next channels of a token: each is asked for a turn ahead.
NATIVE_INLINE void convolved(const RecurrenceTask& task, InputPlace at, int n, int from, int count, float* out,
                             long stride) {
  const ConvWeights conv = {task.net.kernel, task.net.conv_bias, task.sizes.channels, task.net.width};
  for (int c = 0; c < n; c += 16)
    causal_conv(
        conv, at.own + c, from, from + count,
        [&](int position) {
          const float* input = task.input(position, at) + c;
          __builtin_prefetch(input + 16);
          return load(input);
        },
        [&](int position, Lanes, Lanes sum) { store(out + (position - from) * stride + c, silu_of(sum)); });
}

// Decays and rates of value head h: rates of Mamba2 are its time steps.
NATIVE_INLINE void decays_and_rates(const RecurrenceTask& task, int h, int from, int count, float* decay, float* rate) {
  const NativeRecurrence& net = task.net;
  const Lanes strength = zero() - exp_of(all(net.a_log[h])), bias = all(net.dt_bias[h]);
  const bool has_rates = task.sizes.gates == 2;  // else both come from one gate
  for (int t = 0; t < count; t += 16) {
    alignas(64) float a[16] = {}, b[16] = {};
    for (int i = 0; i < 16 && t + i < count; i++) {
      a[i] = *task.input(from + t + i, task.gates(has_rates, h));
      if (has_rates) b[i] = *task.input(from + t + i, task.gates(0, h));
    }
    Lanes time = softplus_of(fma(load(a), all(net.dt_scale), bias));
    if (!has_rates) time = smaller(larger(time, all(net.least_dt)), all(net.most_dt));
    store(decay + t, exp_of(strength * time)), store(rate + t, has_rates ? sigmoid_of(load(b)) : time);
  }
}

// Rates of value head h, a decay for each key [count][keys], and the head's keys times those.
NATIVE_INLINE void decays_of_keys(const RecurrenceTask& task, int h, int from, int count, const float* k, float* decays,
                                  float* faded, float* rate) {
  const NativeRecurrence& net = task.net;
  const Lanes strength = zero() - exp_of(all(net.a_log[h]));
  for (int t = 0; t < count; t++) {
    const float* a = task.input(from + t, task.gates_of_keys(h));
    for (int i = 0; i < net.key_dim; i += 16) {
      const long at = (long)t * net.key_dim + i;
      const Lanes decay = exp_of(strength * softplus_of(load(a + i) + load(net.dt_bias + (long)h * net.key_dim + i)));
      store(decays + at, decay), store(faded + at, decay * load(k + at));
    }
    alignas(64) float b[16] = {*task.input(from + t, task.gates(0, h))};
    store(b, sigmoid_of(load(b)));
    rate[t] = b[0];
  }
}

// The rows that a later step may need, of this unit's channels.
inline void keep_rows(const RecurrenceTask& task) {
  const NativeRecurrence& net = task.net;
  const int heads = task.sizes.heads;
  for (int p = std::max(task.seq.first_position, task.end() - net.columns); p < task.end(); p++) {
    auto keep = [&](InputPlace at, int n) { memcpy(task.kept(p) + at.kept, task.own(p) + at.own, n * sizeof(float)); };
    keep(task.queries(), net.key_dim), keep(task.keys(), net.key_dim);
    keep(task.values(task.first), heads * net.value_dim);
    if (net.gates.groups)
      keep(task.gates(0, task.first), heads), keep(task.gates_of_keys(task.first), heads * net.key_dim);
    else
      for (int g = 0; g < task.sizes.gates; g++) keep(task.gates(g, task.first), heads);
  }
}

}  // namespace
