// The k-th largest of many numbers, by passes that read sixteen at a time (after R. W. Floyd and R. L. Rivest).
// A pass keeps the numbers between two of a sample's, among which the k-th largest most likely is, and counts those above.
// What the numbers mean does not live here.
#pragma once
#include <math.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "words.h"

namespace {

// Numbers in blocks of 64 behind one another, but for the last block.
struct Numbers {
  const float* first;
  const float* last_block;  // or null: of no 64, and nothing but -inf behind its end
  long count;               // a multiple of 16

  const float* at(long i) const { return last_block && i >= (count - 1) / 64 * 64 ? last_block + i % 64 : first + i; }
};

class Selection {
 public:
  // Of numbers without a NaN; 1 <= k <= count.
  float kth_largest(Numbers from, long k) {
    for (int pass = 0; from.count > FEW && pass < MOST_PASSES; pass++) {
      Bracket around = bracket(from, k, pass % 4 == 3);
      std::vector<float>& room = rooms[pass % 2];
      room.resize(std::max((long)room.size(), from.count + 16));
      long above, inside = keep<INSIDE>(from, around, room.data(), above);
      if (k > above && k <= above + inside && around.low == around.high) return around.low;
      long kept = inside;
      if (k <= above) kept = keep<ABOVE>(from, around, room.data(), above);
      else if (k <= above + inside) k -= above;
      else k -= above + inside, kept = keep<BELOW>(from, around, room.data(), above);
      from = filled_up(room.data(), kept);
    }
    return among_few(from, k);
  }
  float kth_largest(const std::vector<float>& values, long count, long k) {
    return kth_largest({values.data(), nullptr, count}, k);
  }

 private:
  enum { FEW = 256, MANY = 8192, MOST_SAMPLED = 128, MOST_PASSES = 16 };
  enum Part { INSIDE, ABOVE, BELOW };
  struct Bracket {
    float low, high;  // both are inside
  };
  std::vector<float> rooms[2];

  // -inf up to a multiple of 16: no number is less.
  static Numbers filled_up(float* values, long count) {
    long end = (count + 15) / 16 * 16;
    std::fill(values + count, values + end, -INFINITY);
    return {values, nullptr, end};
  }
  // Three standard deviations of what a sample tells of a rank; or the one number in the middle, which parts even
  // equal ones.
  static Bracket bracket(const Numbers& from, long k, bool narrow) {
    float sample[MOST_SAMPLED];
    int sampled = from.count < MANY ? MOST_SAMPLED / 4 : MOST_SAMPLED;
    for (int i = 0; i < sampled; i++) sample[i] = *from.at(from.count * i / sampled);
    std::sort(sample, sample + sampled, std::greater<float>());
    float rank = (float)k / (float)from.count * (float)sampled;
    float apart = narrow ? 0.0f : 3.0f * sqrtf(rank * (1.0f - rank / (float)sampled)) + 1.0f;
    int high = (int)(rank - apart), low = (int)(rank + apart);
    return {low >= sampled && !narrow ? -INFINITY : sample[std::min(low, sampled - 1)],
            high < 0 ? INFINITY : sample[std::min(high, sampled - 1)]};
  }
  template <Part part> static long keep(const Numbers& from, Bracket around, float* to, long& num_above) {
    Lanes low = all(around.low), high = all(around.high);
    long kept = 0, above = 0;
    for (long i = 0; i < from.count; i += 16) {
      Lanes v = load(from.at(i));
      unsigned over = mask_above(v, high), at_least = mask_at_least(v, low);
      above += __builtin_popcount(over);
      kept += pack(to + kept, part == ABOVE ? over : part == BELOW ? ~at_least & 0xffff : at_least & ~over, v);
    }
    num_above = above;
    return kept;
  }
  float among_few(const Numbers& from, long k) {
    std::vector<float>& values = few;
    values.resize(from.count);
    for (long i = 0; i < from.count; i++) values[i] = *from.at(i);
    std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
    return values[k - 1];
  }
  std::vector<float> few;
};

}  // namespace
