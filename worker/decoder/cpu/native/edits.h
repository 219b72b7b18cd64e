// Edits of a row of logits before it is drawn from: grammar, allowed tokens, bans, bias, penalties, in this order.
// The same arithmetic, element by element, as worker/sampling/logits_processors.py, which says what each is for.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "sampler.h"

namespace {

// Makes an edited copy of a row. Its memory is kept for the next one.
class Editor {
 public:
  const float* edited(const float* logits, int vocab, const HfEdits& edits) {
    row.assign(logits, logits + vocab);
    if (edits.mask) keep_grammatical(edits);
    if (edits.allowed) keep_allowed(edits);
    if (edits.num_banned) ban(edits);
    for (long i = 0; i < edits.num_biased; i++)
      if (is_known(edits.biased[i])) row[edits.biased[i]] += edits.biases[i];
    if (edits.penalize) penalize(edits);
    return row.data();
  }

 private:
  std::vector<float> row, before;
  std::vector<uint32_t> counts;  // zeros between two rows
  static constexpr uint32_t PROMPT = 0x80000000u;

  bool is_known(long token) const { return token >= 0 && token < (long)row.size(); }

  void keep_grammatical(const HfEdits& e) {
    long vocab = (long)row.size(), masked = std::min(vocab, e.mask_bits);
    for (long i = 0; i < masked; i++)
      if (!(e.mask[i >> 3] >> (i & 7) & 1)) row[i] = -INFINITY;
    std::fill(row.begin() + masked, row.end(), -INFINITY);
  }

  // All stay where none is known, or none that the grammar allows.
  void keep_allowed(const HfEdits& e) {
    before.clear();
    float best = -INFINITY;
    bool any = false;
    for (long i = 0; i < e.num_allowed; i++) {
      before.push_back(is_known(e.allowed[i]) ? row[e.allowed[i]] : 0.0f);
      if (is_known(e.allowed[i])) any = true, best = std::max(best, before.back());
    }
    if (!any || (e.mask && best == -INFINITY)) return;
    std::fill(row.begin(), row.end(), -INFINITY);
    for (long i = 0; i < e.num_allowed; i++)
      if (is_known(e.allowed[i])) row[e.allowed[i]] = before[i];
  }

  // Bans are off where they leave no token.
  void ban(const HfEdits& e) {
    before.clear();
    for (long i = 0; i < e.num_banned; i++) before.push_back(is_known(e.banned[i]) ? row[e.banned[i]] : 0.0f);
    for (long i = 0; i < e.num_banned; i++)
      if (is_known(e.banned[i])) row[e.banned[i]] = -INFINITY;
    for (float value : row)
      if (value > -INFINITY) return;
    for (long i = 0; i < e.num_banned; i++)
      if (is_known(e.banned[i])) row[e.banned[i]] = before[i];
  }

  void penalize(const HfEdits& e) {
    counts.resize(std::max(counts.size(), row.size()));
    for (long i = 0; i < e.num_outputs; i++)
      if (is_known(e.outputs[i])) counts[e.outputs[i]]++;
    for (long i = 0; i < e.num_prompt; i++)
      if (is_known(e.prompt[i])) counts[e.prompt[i]] |= PROMPT;
    for (long i = 0; i < e.num_outputs; i++) penalize_once(e, e.outputs[i]);
    for (long i = 0; i < e.num_prompt; i++) penalize_once(e, e.prompt[i]);
  }
  void penalize_once(const HfEdits& e, long token) {
    if (!is_known(token) || !counts[token]) return;
    float value = row[token], count = (float)(counts[token] & ~PROMPT);
    value = value > 0 ? value / e.repetition : value * e.repetition;
    if (count > 0) value = (value - e.frequency * count) - e.presence;
    row[token] = value, counts[token] = 0;
  }
};

}  // namespace
