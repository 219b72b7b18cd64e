// A row of logits as the sampler reads it: in blocks of 64, with the best of each. Its k best tokens, and a token's rank.
// What is drawn from it does not live here.
#pragma once
#include <math.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "functions.h"
#include "words.h"

namespace {

enum { BLOCK = 64 };

// One row, in blocks of 64 of which the last one is filled up with -inf, and the best logit of each.
struct Row {
  const float* logits = nullptr;
  int vocab = 0, blocks = 0;
  std::vector<float> best;  // [blocks]
  const float* known_mass = nullptr;  // [blocks], or null where the head did not tell
  alignas(64) float tail[BLOCK];
  float largest = 0;
  bool is_broken = false;

  const float* block(int b) const { return (b + 1) * BLOCK <= vocab ? logits + (long)b * BLOCK : tail; }

  // `known`: the best of each block, NaN where one is not finite, or null; `mass` as `block_mass` of each, or null.
  void read(const float* from, int count, const float* known, const float* mass = nullptr) {
    known_mass = nullptr, logits = from, vocab = count, blocks = (count + BLOCK - 1) / BLOCK;
    best.resize(blocks);
    if (count % BLOCK) {
      std::fill(tail, tail + BLOCK, -INFINITY);
      memcpy(tail, from + count / BLOCK * BLOCK, count % BLOCK * sizeof(float));
    }
    if (!known || !take_over(known)) find_best();
    else known_mass = mass;
  }
  // The same logits, of which some have changed since the other row was read.
  void read_again(const Row& other, const std::vector<int>& changed) {
    logits = other.logits, vocab = other.vocab, blocks = other.blocks, best = other.best;
    if (vocab % BLOCK) {
      std::fill(tail, tail + BLOCK, -INFINITY);
      memcpy(tail, logits + vocab / BLOCK * BLOCK, vocab % BLOCK * sizeof(float));
    }
    for (int token : changed) {
      const float* p = block(token / BLOCK);
      best[token / BLOCK] = largest_of(larger(larger(load(p), load(p + 16)), larger(load(p + 32), load(p + 48))));
    }
    largest = *std::max_element(best.begin(), best.end());
  }

 private:
  bool take_over(const float* known) {
    is_broken = false, largest = -INFINITY;
    for (int b = 0; b < blocks; b++) {
      if (known[b] != known[b]) return false;
      best[b] = known[b], largest = std::max(largest, known[b]);
    }
    return true;
  }
  void find_best() {
    unsigned ordered = 0xffff;
    largest = -INFINITY;
    for (int b = 0; b < blocks; b++) {
      const float* p = block(b);
      Lanes v0 = load(p), v1 = load(p + 16), v2 = load(p + 32), v3 = load(p + 48);
      ordered &= mask_equal(v0, v0) & mask_equal(v1, v1) & mask_equal(v2, v2) & mask_equal(v3, v3);
      best[b] = largest_of(larger(larger(v0, v1), larger(v2, v3)));
      largest = std::max(largest, best[b]);
    }
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
    for (int b = 0; b < blocks; b++)
      if (best[b] == largest) return first_equal(b, largest);
    return 0;
  }
  int first_equal(int b, float value) const {
    const float* p = block(b);
    int i = 0;
    while (p[i] != value) i++;
    return b * BLOCK + i;
  }
};

// The tokens among which the k best are: all at least as good as the k-th of the blocks' best ones.
float bound_of_best(const Row& row, int k, std::vector<float>& values) {
  if (k > row.blocks) return -INFINITY;
  values.assign(row.best.begin(), row.best.end());
  std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
  return values[k - 1];
}
template <class Fn> void each_at_least(const Row& row, float bound, Fn&& fn) {
  for (int b = 0; b < row.blocks; b++) {
    if (row.best[b] < bound) continue;
    const float* p = row.block(b);
    int end = std::min((int)BLOCK, row.vocab - b * BLOCK);
    for (int i = 0; i < end; i++)
      if (p[i] >= bound) fn(b * BLOCK + i, p[i]);
  }
}
float kth_best(const Row& row, int k, std::vector<float>& values) {
  float bound = bound_of_best(row, k, values);
  values.clear();
  each_at_least(row, bound, [&](int, float value) { values.push_back(value); });
  std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
  return values[k - 1];
}

// The rank of a token: equal logits rank by token.
int rank_of(const Row& row, int token) {
  float value = row.logits[token];
  int rank = 1;
  for (int b = 0; b < row.blocks; b++) {
    if (row.best[b] < value) continue;
    const float* p = row.block(b);
    for (int j = 0; j < BLOCK; j += 16) {
      rank += __builtin_popcount(mask_above(load(p + j), all(value)));
      for (unsigned equal = mask_equal(load(p + j), all(value)); equal; equal &= equal - 1)
        rank += b * BLOCK + j + __builtin_ctz(equal) < token;
    }
  }
  return rank;
}

}  // namespace
