// Masses of a row: sums of the exponentials of its logits less the largest one.
// They are float exponentials added in doubles, 16 lanes of them, in the order of the tokens, so that sums have the same
// bits on every machine, and a sum of more tokens is never the smaller one. What a draw does with them does not live here.
#pragma once
#include <math.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "functions.h"
#include "logits_row.h"
#include "words.h"

namespace {

const float LEAST_EXPONENT = -89.0f;  // below it an exponential is 0

struct Mass {
  double all, above;
};

// The exponentials of 16 scaled logits less the largest one.
NATIVE_INLINE Lanes exponentials(Lanes scaled, float top) { return exp2_of((scaled - all(top)) * all(LOG2_E)); }
NATIVE_INLINE Lanes sum_of_four(const Lanes* v) { return (v[0] + v[1]) + (v[2] + v[3]); }

// The exponentials of scaled logits less the largest one: of all that are at least `least`, and of those above `bar`.
Mass mass_of(const Row& row, float scale, float least, float bar) {
  Doubles all_sum = no_doubles(), above_sum = no_doubles();
  float top = row.largest * scale;
  for (int b = 0; b < row.blocks; b++) {
    float block_best = row.best[b] * scale;
    if (block_best < least || block_best - top < LEAST_EXPONENT) continue;
    const float* p = row.block(b);
    Lanes scaled[4], part[4];
    for (int i = 0; i < 4; i++) scaled[i] = load(p + 16 * i) * all(scale), part[i] = exponentials(scaled[i], top);
    if (block_best > bar) {
      Lanes better[4];
      for (int i = 0; i < 4; i++) better[i] = kept_above(scaled[i], all(bar), part[i]);
      add(above_sum, sum_of_four(better));
    }
    if (least > -INFINITY)
      for (int i = 0; i < 4; i++) part[i] = kept_at_least(scaled[i], all(least), part[i]);
    add(all_sum, sum_of_four(part));
  }
  return {sum_of(all_sum), sum_of(above_sum)};
}
// Of those above `bar` alone, to the same bits.
double mass_above(const Row& row, float scale, float bar) {
  Doubles sum = no_doubles();
  float top = row.largest * scale;
  for (int b = 0; b < row.blocks; b++) {
    float block_best = row.best[b] * scale;
    if (block_best <= bar || block_best - top < LEAST_EXPONENT) continue;
    const float* p = row.block(b);
    Lanes better[4];
    for (int i = 0; i < 4; i++) {
      Lanes scaled = load(p + 16 * i) * all(scale);
      better[i] = kept_above(scaled, all(bar), exponentials(scaled, top));
    }
    add(sum, sum_of_four(better));
  }
  return sum_of(sum);
}

// The logarithm of the sum of all exponentials of logits less the largest one, from the masses of blocks.
double log_mass_of(const Row& row) {
  Doubles sum = no_doubles();
  Lanes largest = all(row.largest), least = all(LEAST_EXPONENT);
  for (int first = 0; first < row.blocks; first += 16) {
    Lanes gaps = load(&row.best[first]);
    unsigned counts = mask_above(gaps - largest, least);
    alignas(64) float masses[16] = {};
    int end = std::min(16, row.blocks - first);
    if (row.known_mass) memcpy(masses, row.known_mass + first, end * sizeof(float));
    else
      for (int i = 0; i < end; i++)
        if (counts >> i & 1) masses[i] = row.mass(first + i);
    add(sum, exponentials(kept_in(counts, gaps, largest), row.largest) * kept_in(counts, load(masses), zero()));
  }
  return log_of(sum_of(sum));
}

// A guess at a bar that tokens of `share` of the mass are above: from the best of each block, and a sample of the others.
class Guess {
 public:
  float bar(const Row& row, float scale, float least, double share) {
    read(row, scale, least);
    float low = std::max(least, row.largest * scale - 30.0f), high = row.largest * scale;
    float wanted = (float)share * mass_above_bar(-INFINITY);
    for (int i = 0; i < STEPS; i++) {
      float middle = 0.5f * (low + high);
      (mass_above_bar(middle) < wanted ? high : low) = middle;
    }
    return low;
  }

 private:
  enum { STEPS = 9, APART = 16 };  // of how many blocks one is looked at
  std::vector<float> scaled, masses;
  size_t num_bests = 0;

  void put(Lanes v, float top, float least, float weight) {
    size_t at = scaled.size();
    scaled.resize(at + 16), masses.resize(at + 16);
    store(&scaled[at], v), store(&masses[at], kept_at_least(v, all(least), exponentials(v, top)) * all(weight));
  }
  // A sampled block's best is taken off where it is put again: the bests count by themselves.
  void read(const Row& row, float scale, float least) {
    scaled.clear(), masses.clear();
    float top = row.largest * scale;
    for (size_t b = 0; b < row.best.size(); b += 16) put(load(&row.best[b]) * all(scale), top, least, 1.0f);
    for (int b = APART / 2; b < row.blocks; b += APART) {
      const float* p = row.block(b);
      Lanes best = all(row.best[b]);
      for (int j = 0; j < BLOCK; j += 16) {
        Lanes v = load(p + j);
        put(kept_in(mask_equal(v, best), all(-INFINITY), v) * all(scale), top, least, APART);
      }
    }
  }
  float mass_above_bar(float bar) const {
    Lanes sum = zero();
    for (size_t i = 0; i < scaled.size(); i += 16) sum = sum + kept_above(load(&scaled[i]), all(bar), load(&masses[i]));
    return sum_of(sum);
  }
};

}  // namespace
