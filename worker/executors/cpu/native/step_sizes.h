// What a layer has, and what a step of a model keeps between its phases: the most that any layer needs, in numbers of a row.
#pragma once
#include <algorithm>

#include "decoder.h"
#include "recurrence_task.h"
#include "rows.h"

namespace {

// --- what a layer has ---

inline bool attends(const NativeLayer& l) { return l.num_heads > 0; }
inline bool keeps_state(const NativeLayer& l) { return l.conv || l.recurrence; }
inline bool mixes(const NativeLayer& l) { return attends(l) || keeps_state(l); }
inline bool feeds(const NativeLayer& l) { return l.experts || l.mlp.up.groups > 0; }
inline bool shares_norm(const NativeLayer& l) {
  return l.recurrence && l.recurrence->norm_heads > l.recurrence->value_heads;
}
inline int units_in(const NativeLinear& linear) { return linear.slices * linear.slice_tiles; }
inline int inner_length(const NativeMlp& mlp) { return units_in(mlp.down) * K_TILE; }
// Inner numbers that a group of outputs of the first product becomes.
inline int inner_of_group(const NativeMlp& mlp) { return mlp.has_gate ? GROUP / 2 : (int)GROUP; }

// What rows of second products take, of all layers: those of latent attention, and gates of each key of a recurrence.
struct LatentSizes {
  int query_rows = 0, head_queries = 0, plain = 0, weighed = 0;
  // Returns the numbers of a row of the recurrence's inputs, with those of its gates.
  int add(const NativeRecurrence& net) {
    const RecurrenceSizes sizes(net);
    const int own = std::max(net.inputs.groups * GROUP, (int)sizes.before_rates + net.rates.groups * GROUP);
    if (!net.gates.groups) return own;
    query_rows = std::max(query_rows, net.gate_inputs);
    return std::max(own, sizes.channels + net.value_heads + net.gate_inputs + net.gates.groups * GROUP);
  }
  void add(const NativeLayer& l) {
    const NativeLatent& latent = *l.latent;
    if (latent.queries.groups) query_rows = std::max(query_rows, latent.query_outputs);
    head_queries = std::max(head_queries, latent.queries.groups * GROUP);
    plain = std::max(plain, latent.absorb.slice_tiles * K_TILE);
    weighed = std::max(weighed, l.num_heads * latent.expand.slice_tiles * K_TILE);
  }
};

struct StepSizes {
  LatentSizes latents;
  int projected = 0, attended = 0;          // inputs of a first half, and of its output
  int inner = 0, shared = 0;                // of MLPs, and of experts that all rows have
  int experts = 0, logits = 0, chosen = 1;  // experts of a layer, their logits, and experts of a row
  int latent = 0;                           // rows of experts that are not hidden ones
  int units = 0, inner_units = 0;  // of a row of a main product's inputs and of those of MLPs, if any are in units
  bool has_scores = false, has_states = false;
  void add(const NativeLayer& l) {
    for (const NativeLinear* linear : {&l.qkv, &l.output, &l.mlp.up, &l.mlp.down})
      if (linear->units.bits) units = std::max(units, units_in(*linear));
    if (keeps_state(l)) {
      has_states = true;
      projected = std::max(projected, l.conv ? l.conv->inputs.groups * GROUP : latents.add(*l.recurrence));
    }
    if (attends(l)) projected = std::max(projected, l.qkv.groups * GROUP);
    if (attends(l) && l.latent) latents.add(l);
    attended = std::max(attended, l.output.slices * l.output.slice_tiles * K_TILE);
    if (feeds(l) && (!l.experts || l.beside)) add_inner(l.mlp);
    if (l.experts) add(*l.experts);
    if (l.experts && l.experts->latent) shared = std::max(shared, inner_length(l.mlp));
  }
  void add_inner(const NativeMlp& mlp) {
    inner = std::max(inner, inner_length(mlp));
    if (mlp.down.units.bits) inner_units = std::max(inner_units, units_in(mlp.down));
  }
  void add(const NativeExperts& e) {
    for (int i = 0; i < e.num_experts; i++) add_inner(e.experts[i]);
    if (e.shared) shared = std::max(shared, inner_length(*e.shared));
    if (e.latent) latent = std::max(latent, e.latent->outputs);
    chosen = std::max(chosen, e.top_k), experts = std::max(experts, e.num_experts);
    logits = std::max(logits, e.router.outputs), has_scores |= e.selection_bias || e.num_groups > 1;
  }
};

}  // namespace
