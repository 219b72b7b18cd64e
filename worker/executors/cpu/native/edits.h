// Edits of a row of logits before it is drawn from: grammar, allowed tokens, bans, bias, penalties, in this order.
// The same arithmetic, element by element, as tests/reference/logits_processors.py, which says what each is for.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "logits_row.h"
#include "sampler.h"
#include "words.h"

namespace {

// Edits one row after the other: a copy where many tokens change, else in place, with what is needed to undo it.
class Editor {
 public:
  std::vector<int> changed;  // tokens whose blocks have another best one than `bests` says
  std::vector<float> bests;  // of a copy's blocks before these changes, as `Row::best`

  static bool is_sparse(const NativeEdits& e) { return !e.mask && !e.allowed; }

  // Valid until the next row.
  const float* edited_copy(const Row& given, const NativeEdits& edits) {
    row = nullptr, vocab = given.vocab;
    copy.resize(std::max((long)copy.size(), vocab));
    bests = given.best;
    if (edits.mask) keep_grammatical(given, edits);
    if (edits.allowed) keep_allowed(given, edits);
    if (!row) memcpy(row = copy.data(), given.logits, vocab * sizeof(float));
    edit_tokens(edits);
    return row;
  }
  void edit_in_place(float* logits, int count, const NativeEdits& edits) {
    row = logits, vocab = count;
    edit_tokens(edits);
  }
  void undo() {
    for (size_t i = changed.size(); i-- > 0;) row[changed[i]] = replaced[i];
    forget();
  }
  void forget() { changed.clear(), replaced.clear(); }

 private:
  float* row = nullptr;  // null: a copy that is still the row it is made of
  long vocab = 0;
  std::vector<float> copy, before, replaced, times;
  std::vector<uint32_t> counts;  // zeros between two rows
  static constexpr uint32_t PROMPT = 0x80000000u;

  bool is_known(long token) const { return token >= 0 && token < vocab; }
  void set(long token, float value) {
    changed.push_back((int)token), replaced.push_back(row[token]);
    row[token] = value;
  }

  // The bits of a block's tokens; none beyond the mask.
  static uint64_t mask_of_block(const NativeEdits& e, long b) {
    uint64_t bits = 0;
    long left = std::min((long)BLOCK, e.mask_bits - b * BLOCK);
    if (left <= 0) return 0;
    memcpy(&bits, e.mask + b * (BLOCK / 8), (left + 7) / 8);
    return left == BLOCK ? bits : bits & ((1ull << left) - 1);
  }
  void keep_grammatical(const Row& given, const NativeEdits& e) {
    row = copy.data();
    for (int b = 0; b < given.blocks; b++) {
      const float* p = given.block(b);
      uint64_t kept = mask_of_block(e, b);
      alignas(64) float last[BLOCK];
      float* to = given.end_of(b) == BLOCK ? row + (long)b * BLOCK : last;
      Lanes best = all(-INFINITY);
      for (int j = 0; j < BLOCK; j += 16) {
        Lanes v = kept_in((unsigned)(kept >> j) & 0xffff, load(p + j), all(-INFINITY));
        store(to + j, v), best = larger(best, v);
      }
      if (to == last) memcpy(row + (long)b * BLOCK, last, given.end_of(b) * sizeof(float));
      bests[b] = largest_of(best);
    }
  }

  // All stay where none is known, or none that the grammar allows.
  void keep_allowed(const Row& given, const NativeEdits& e) {
    const float* from = row ? row : given.logits;
    before.clear();
    float best = -INFINITY;
    bool any = false;
    for (long i = 0; i < e.num_allowed; i++) {
      before.push_back(is_known(e.allowed[i]) ? from[e.allowed[i]] : 0.0f);
      if (is_known(e.allowed[i])) any = true, best = std::max(best, before.back());
    }
    if (!any || (e.mask && best == -INFINITY)) return;
    row = copy.data();
    std::fill(row, row + vocab, -INFINITY);
    std::fill(bests.begin(), bests.end(), -INFINITY);
    for (long i = 0; i < e.num_allowed; i++)
      if (is_known(e.allowed[i])) row[e.allowed[i]] = before[i], raise(bests[e.allowed[i] / BLOCK], before[i]);
  }
  static void raise(float& best, float value) { best = std::max(best, value); }

  void edit_tokens(const NativeEdits& e) {
    if (e.num_banned) ban(e);
    for (long i = 0; i < e.num_biased; i++)
      if (is_known(e.biased[i])) set(e.biased[i], row[e.biased[i]] + e.biases[i]);
    if (e.penalize) penalize(e);
  }

  // Bans are off where they leave no token.
  void ban(const NativeEdits& e) {
    for (long i = 0; i < e.num_banned; i++)
      if (is_known(e.banned[i])) set(e.banned[i], -INFINITY);
    if (!has_any()) undo();
  }
  bool has_any() const {
    long i = 0;
    for (; i + 16 <= vocab; i += 16)
      if (mask_above(load(row + i), all(-INFINITY))) return true;
    for (; i < vocab; i++)
      if (row[i] > -INFINITY) return true;
    return false;
  }

  void penalize(const NativeEdits& e) {
    counts.resize(std::max((long)counts.size(), vocab));
    for (long i = 0; i < e.num_outputs; i++)
      if (is_known(e.outputs[i])) counts[e.outputs[i]]++;
    for (long i = 0; i < e.num_prompt; i++)
      if (is_known(e.prompt[i])) counts[e.prompt[i]] |= PROMPT;
    size_t first = changed.size();
    times.clear();
    for (long i = 0; i < e.num_outputs; i++) take_count(e.outputs[i]);
    for (long i = 0; i < e.num_prompt; i++) take_count(e.prompt[i]);
    for (size_t i = 0; i < times.size(); i += 16)
      penalize_sixteen(e, first + i, &times[i], std::min((size_t)16, times.size() - i));
  }
  // Each token once, with how often the output has it.
  void take_count(long token) {
    if (!is_known(token) || !counts[token]) return;
    changed.push_back((int)token), replaced.push_back(row[token]);
    times.push_back((float)(counts[token] & ~PROMPT));
    counts[token] = 0;
  }
  void penalize_sixteen(const NativeEdits& e, size_t first, const float* counted, int count) {
    alignas(64) float values[16] = {}, numbers[16] = {};
    memcpy(values, &replaced[first], count * sizeof(float)), memcpy(numbers, counted, count * sizeof(float));
    Lanes v = load(values), n = load(numbers), repetition = all(e.penalties.repetition_penalty);
    v = where_above(v, zero(), v / repetition, v * repetition);
    store(values,
          where_above(n, zero(), (v - all(e.penalties.frequency_penalty) * n) - all(e.penalties.presence_penalty), v));
    for (int i = 0; i < count; i++) row[changed[first + i]] = values[i];
  }
};

}  // namespace
