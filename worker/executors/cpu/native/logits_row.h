// A row of logits as the sampler reads it: in blocks of 64, with the best of each. Its k best tokens, and a token's rank.
// What is drawn from it does not live here.
#pragma once
#include <math.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "functions.h"
#include "selection.h"
#include "words.h"

namespace {

enum { BLOCK = 64 };

// One row, in blocks of 64 of which the last one is filled up with -inf, and the best logit of each.
struct Row {
  const float* logits = nullptr;
  int vocab = 0, blocks = 0;
  std::vector<float> best;            // [blocks], and -inf up to a multiple of 16
  const float* known_mass = nullptr;  // [blocks], or null where the head did not tell
  alignas(64) float tail[BLOCK];
  float largest = 0;
  bool is_broken = false;

  const float* block(int b) const { return (b + 1) * BLOCK <= vocab ? logits + (long)b * BLOCK : tail; }
  int end_of(int b) const { return std::min((int)BLOCK, vocab - b * BLOCK); }

  // `known`: the best of each block, NaN where one is not finite, or null; `mass` as `block_mass` of each, or null.
  void read(const float* from, int count, const float* known, const float* mass = nullptr) {
    known_mass = nullptr, logits = from, vocab = count, blocks = (count + BLOCK - 1) / BLOCK;
    best.assign((blocks + 15) / 16 * 16, -INFINITY);
    fill_tail();
    if (!known || !take_over(known)) find_best();
    else known_mass = mass;
  }
  // Logits like another row's, but for some that have changed. `bests` are of the blocks without a change.
  void read_again(const float* from, const Row& other, const std::vector<float>& bests,
                  const std::vector<int>& changed) {
    logits = from, vocab = other.vocab, blocks = other.blocks, best = bests;
    fill_tail();
    is_seen.assign(blocks, 0);
    for (int token : changed) {
      int b = token / BLOCK;
      if (is_seen[b]) continue;
      is_seen[b] = 1, best[b] = best_of(b);
    }
    find_largest();
  }

 private:
  std::vector<char> is_seen;  // blocks

  void fill_tail() {
    if (vocab % BLOCK == 0) return;
    std::fill(tail, tail + BLOCK, -INFINITY);
    memcpy(tail, logits + vocab / BLOCK * BLOCK, vocab % BLOCK * sizeof(float));
  }
  float best_of(int b) const {
    const float* p = block(b);
    return largest_of(larger(larger(load(p), load(p + 16)), larger(load(p + 32), load(p + 48))));
  }
  void find_largest() {
    Lanes most = all(-INFINITY);
    for (size_t b = 0; b < best.size(); b += 16) most = larger(most, load(&best[b]));
    largest = largest_of(most);
  }
  bool take_over(const float* known) {
    memcpy(best.data(), known, blocks * sizeof(float));
    unsigned ordered = 0xffff;
    for (size_t b = 0; b < best.size(); b += 16) ordered &= mask_equal(load(&best[b]), load(&best[b]));
    is_broken = false;
    find_largest();
    return ordered == 0xffff;
  }
  void find_best() {
    unsigned ordered = 0xffff;
    for (int b = 0; b < blocks; b++) {
      const float* p = block(b);
      Lanes v0 = load(p), v1 = load(p + 16), v2 = load(p + 32), v3 = load(p + 48);
      ordered &= mask_equal(v0, v0) & mask_equal(v1, v1) & mask_equal(v2, v2) & mask_equal(v3, v3);
      best[b] = largest_of(larger(larger(v0, v1), larger(v2, v3)));
    }
    find_largest();
    is_broken = ordered != 0xffff || !(fabsf(largest) < INFINITY);
  }

 public:
  // The exponentials of a block's logits less its best one, summed. The same bits as the head's.
  float mass(int b) const {
    if (known_mass) return known_mass[b];
    if (best[b] == -INFINITY) return 0.0f;
    const float* p = block(b);
    Lanes v[4] = {load(p), load(p + 16), load(p + 32), load(p + 48)};
    return block_mass(v, best[b]);
  }
  // Of equal ones the first.
  int first_best() const {
    for (int first = 0; first < blocks; first += 16) {
      unsigned equal = mask_equal(load(&best[first]), all(largest));
      if (equal) return first_equal(first + __builtin_ctz(equal), largest);
    }
    return 0;
  }
  int first_equal(int b, float value) const {
    const float* p = block(b);
    int i = 0;
    while (p[i] != value) i++;
    return b * BLOCK + i;
  }
};

// A bit for each logit of a block, the first one the lowest.
NATIVE_INLINE uint64_t at_least_in_block(const float* p, float bound) {
  uint64_t mask = 0;
  for (int j = 0; j < BLOCK; j += 16) mask |= (uint64_t)mask_at_least(load(p + j), all(bound)) << j;
  return mask;
}
NATIVE_INLINE uint64_t above_in_block(const float* p, float bound) {
  uint64_t mask = 0;
  for (int j = 0; j < BLOCK; j += 16) mask |= (uint64_t)mask_above(load(p + j), all(bound)) << j;
  return mask;
}

// The tokens among which the k best are: all at least as good as the k-th of the blocks' best ones.
float bound_of_best(const Row& row, int k, Selection& selection) {
  return k > row.blocks ? -INFINITY : selection.kth_largest({row.best.data(), nullptr, (long)row.best.size()}, k);
}

// The k-th best logit.
float kth_best(const Row& row, int k, Selection& selection, std::vector<float>& values) {
  Numbers all_of_row = {row.logits, row.vocab % BLOCK ? row.tail : nullptr, (long)row.blocks * BLOCK};
  if (k > row.blocks / 2) return selection.kth_largest(all_of_row, k);
  float bound = bound_of_best(row, k, selection);
  values.clear();
  for (int b = 0; b < row.blocks; b++) {
    if (row.best[b] < bound) continue;
    const float* p = row.block(b);
    for (uint64_t left = at_least_in_block(p, bound); left; left &= left - 1)
      values.push_back(p[__builtin_ctzll(left)]);
  }
  long count = values.size();
  values.resize((count + 15) / 16 * 16, -INFINITY);
  return selection.kth_largest({values.data(), nullptr, (long)values.size()}, k);
}

// The `count` best tokens, best first; equal logits rank by token.
void best_tokens(const Row& row, int count, Selection& selection, std::vector<int>& tokens) {
  auto is_better = [&](int a, int b) {
    return row.logits[a] > row.logits[b] || (row.logits[a] == row.logits[b] && a < b);
  };
  size_t most = 4 * (size_t)count + 256;
  float bound = bound_of_best(row, count, selection);
  bool is_reached = false;  // as many are as good as the bound: of later tokens only better ones count
  tokens.clear();
  for (int b = 0; b < row.blocks; b++) {
    if (is_reached ? row.best[b] <= bound : row.best[b] < bound) continue;
    const float* p = row.block(b);
    uint64_t left = is_reached ? above_in_block(p, bound) : at_least_in_block(p, bound);
    for (; left; left &= left - 1) tokens.push_back(b * BLOCK + __builtin_ctzll(left));
    while (tokens.size() && tokens.back() >= row.vocab) tokens.pop_back();
    if (tokens.size() < most) continue;
    std::nth_element(tokens.begin(), tokens.begin() + (count - 1), tokens.end(), is_better);
    tokens.resize(count);
    bound = row.logits[tokens[count - 1]], is_reached = true;
  }
  std::partial_sort(tokens.begin(), tokens.begin() + count, tokens.end(), is_better);
  tokens.resize(count);
}

// The rank of a token: equal logits rank by token.
int rank_of(const Row& row, int token) {
  Lanes value = all(row.logits[token]);
  int own = token / BLOCK;
  Counts before = no_counts();
  for (int b = 0; b < own; b++) {
    if (row.best[b] < row.logits[token]) continue;
    const float* p = row.block(b);
    for (int j = 0; j < BLOCK; j += 16) count_at_least(before, load(p + j), value);
  }
  for (int b = own + 1; b < row.blocks; b++) {
    if (row.best[b] <= row.logits[token]) continue;
    const float* p = row.block(b);
    for (int j = 0; j < BLOCK; j += 16) count_above(before, load(p + j), value);
  }
  const float* p = row.block(own);
  uint64_t earlier = (1ull << token % BLOCK) - 1, at_least = at_least_in_block(p, row.logits[token]);
  uint64_t above = above_in_block(p, row.logits[token]);
  return 1 + sum_of(before) + __builtin_popcountll(above | (at_least & earlier));
}

}  // namespace
