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

// Edits one row after the other: a copy where many tokens change, else in place, with what is needed to undo it.
class Editor {
 public:
  std::vector<int> changed;  // tokens, in place

  static bool is_sparse(const HfEdits& e) { return !e.mask && !e.allowed; }

  const float* edited_copy(const float* logits, int count, const HfEdits& edits) {
    copy.assign(logits, logits + count);
    row = copy.data(), vocab = count;
    if (edits.mask) keep_grammatical(edits);
    if (edits.allowed) keep_allowed(edits);
    edit_tokens(edits);
    return row;
  }
  void edit_in_place(float* logits, int count, const HfEdits& edits) {
    row = logits, vocab = count;
    edit_tokens(edits);
  }
  void undo() {
    for (size_t i = changed.size(); i-- > 0;) row[changed[i]] = replaced[i];
    changed.clear(), replaced.clear();
  }

 private:
  float* row = nullptr;
  long vocab = 0;
  std::vector<float> copy, before, replaced;
  std::vector<uint32_t> counts;  // zeros between two rows
  static constexpr uint32_t PROMPT = 0x80000000u;

  bool is_known(long token) const { return token >= 0 && token < vocab; }
  void set(long token, float value) {
    changed.push_back((int)token), replaced.push_back(row[token]);
    row[token] = value;
  }

  void keep_grammatical(const HfEdits& e) {
    long masked = std::min(vocab, e.mask_bits);
    for (long i = 0; i < masked; i++)
      if (!(e.mask[i >> 3] >> (i & 7) & 1)) row[i] = -INFINITY;
    std::fill(row + masked, row + vocab, -INFINITY);
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
    std::fill(row, row + vocab, -INFINITY);
    for (long i = 0; i < e.num_allowed; i++)
      if (is_known(e.allowed[i])) row[e.allowed[i]] = before[i];
  }

  void edit_tokens(const HfEdits& e) {
    if (e.num_banned) ban(e);
    for (long i = 0; i < e.num_biased; i++)
      if (is_known(e.biased[i])) set(e.biased[i], row[e.biased[i]] + e.biases[i]);
    if (e.penalize) penalize(e);
  }

  // Bans are off where they leave no token.
  void ban(const HfEdits& e) {
    for (long i = 0; i < e.num_banned; i++)
      if (is_known(e.banned[i])) set(e.banned[i], -INFINITY);
    for (long i = 0; i < vocab; i++)
      if (row[i] > -INFINITY) return;
    undo();
  }

  void penalize(const HfEdits& e) {
    counts.resize(std::max((long)counts.size(), vocab));
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
    set(token, value);
    counts[token] = 0;
  }
};

}  // namespace
