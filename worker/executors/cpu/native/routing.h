// Which experts a row goes to, and their weights, by the router's logits. Methods of `Decoder`.
//
// Experts are chosen by their logits, or by a score and a bias of their own, which their weights do not have. A router in
// float32 of a model in half precision is packed as the sum of several linears, each in the model's dtype.
#pragma once
#include "step.h"

namespace {

template <class W> void Decoder<W>::choose_experts(const NativeExperts& e, int row) {
  const float* logits = summed_logits(e, row);
  int* chosen = &choices[row * e.top_k];
  float* weight = &weights[row * e.top_k];
  const bool by_scores = e.selection_bias || e.num_groups > 1;
  const float* values = by_scores ? scores_for_choice(e, logits, choice_scores.row(row)) : logits;
  choose_best_of(values, e.num_experts, e.top_k, chosen);
  const float largest = *std::max_element(logits, logits + e.num_experts);
  float sum = 0, kept = 0;
  if (e.scoring == NATIVE_SOFTMAX)
    for (int i = 0; i < e.num_experts; i++) sum += power_of_e(logits[i] - largest);
  for (int k = 0; k < e.top_k; k++)
    kept += weight[k] =
        e.scoring == NATIVE_SIGMOID ? one_sigmoid(logits[chosen[k]]) : power_of_e(logits[chosen[k]] - largest);
  if (e.scoring == NATIVE_SOFTMAX && e.least_sum > 0) kept = std::max(kept, e.least_sum * sum);
  else kept = std::max(kept, e.least_sum);
  for (int k = 0; k < e.top_k; k++) {
    weight[k] /= e.normalized || e.scoring == NATIVE_SOFTMAX_OF_TOP ? kept : e.scoring == NATIVE_SOFTMAX ? sum : 1.0f;
    if (e.scales) weight[k] *= e.scales[chosen[k]];
  }
}

// The first of the router's outputs, to which the others are added.
template <class W> const float* Decoder<W>::summed_logits(const NativeExperts& e, int row) {
  float* logits = router_logits.row(row);
  for (int part = e.router.outputs / e.num_experts - 1; part > 0; part--)
    for (int i = 0; i < e.num_experts; i++) {
      float* to = logits + (part - 1) * e.num_experts + i;
      *to += logits[part * e.num_experts + i];
    }
  return logits;
}

// Scores and biases; -inf for experts of groups that are not chosen.
template <class W>
const float* Decoder<W>::scores_for_choice(const NativeExperts& e, const float* logits, float* scores) {
  const int count = e.num_experts;
  float sum = 0;
  if (e.scoring == NATIVE_SIGMOID)
    for (int i = 0; i < count; i += 16) store(scores + i, sigmoid_of(load(logits + i)));
  else {
    const float largest = *std::max_element(logits, logits + count);
    for (int i = 0; i < count; i += 16) store(scores + i, exp_of(load(logits + i) - all(largest)));
    for (int i = 0; i < count; i++) sum += scores[i];
  }
  for (int i = 0; i < count; i++) {
    if (sum > 0) scores[i] /= sum;
    if (e.selection_bias) scores[i] += e.selection_bias[i];
  }
  if (e.num_groups > 1) keep_best_groups(e, scores);
  return scores;
}

// A group counts as the sum of its two best scores, or as its best; of equal groups the first is chosen.
template <class W> void Decoder<W>::keep_best_groups(const NativeExperts& e, float* scores) {
  const int size = e.num_experts / e.num_groups;
  auto sum_of_best = [&](int group) {
    float best = -INFINITY, next = -INFINITY;
    for (int i = group * size; i < (group + 1) * size; i++)
      if (scores[i] > best) next = best, best = scores[i];
      else next = std::max(next, scores[i]);
    return e.group_best == 1 ? best : best + next;
  };
  std::vector<float> sums;
  for (int g = 0; g < e.num_groups; g++) sums.push_back(sum_of_best(g));
  std::vector<int> kept(e.top_groups);
  choose_best_of(sums.data(), e.num_groups, e.top_groups, kept.data());
  for (int g = 0; g < e.num_groups; g++)
    if (std::find(kept.begin(), kept.end(), g) == kept.end()) std::fill_n(scores + g * size, size, -INFINITY);
}

// The largest one after the other; of equal ones the first.
template <class W> void Decoder<W>::choose_best_of(const float* values, int count, int most, int* chosen) {
  for (int k = 0; k < most; k++) {
    int best = -1;
    for (int i = 0; i < count; i++)
      if (std::find(chosen, chosen + k, i) == chosen + k && (best < 0 || values[i] > values[best])) best = i;
    chosen[k] = best;
  }
}

template <class W> float Decoder<W>::power_of_e(float x) {
  alignas(64) float v[16] = {x};
  store(v, exp_of(load(v)));
  return v[0];
}
template <class W> float Decoder<W>::one_sigmoid(float x) {
  alignas(64) float v[16] = {x};
  store(v, sigmoid_of(load(v)));
  return v[0];
}

}  // namespace
