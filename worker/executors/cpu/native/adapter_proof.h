// The proof of a packed adapter: what a step adds to outputs of fixed inputs is scale B A x, by the matrices of its file.
#pragma once
#include <math.h>

#include <vector>

#include "adapter_numbers.h"
#include "turned.h"

// `executor.cpp`: the products of a step.
extern "C" void native_added(const NativeAdapted* adapted, int dtype, const void* row, int slices, long length,
                             int groups, float* out);

namespace {

inline __m256 without_sign(__m256 v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }
inline float sum_of_eight(__m256 v) {
  alignas(32) float sums[EIGHT];
  _mm256_store_ps(sums, v);
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}
// Sums of each of eight rows.
NATIVE_INLINE __m256 sums_of_rows(const __m256* rows) {
  __m256 twos[4], fours[2];
  for (int i = 0; i < 4; i++)
    twos[i] = _mm256_add_ps(_mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]),
                            _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]));
  for (int i = 0; i < 2; i++) {
    const __m256d one = _mm256_castps_pd(twos[2 * i]), other = _mm256_castps_pd(twos[2 * i + 1]);
    fours[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(one, other)),
                             _mm256_castpd_ps(_mm256_unpackhi_pd(one, other)));
  }
  return _mm256_add_ps(_mm256_permute2f128_ps(fours[0], fours[1], 0x20),
                       _mm256_permute2f128_ps(fours[0], fours[1], 0x31));
}
inline float largest_of_eight(__m256 v) {
  alignas(32) float each[EIGHT];
  _mm256_store_ps(each, v);
  return *std::max_element(each, each + EIGHT);
}

// What the matrices of one module add to outputs of fixed inputs x [filled up], rounded as they are packed, and how far
// from it is what a step adds.
template <int DTYPE> class Expected {
 public:
  Expected(const NativeLowRank& part, const std::vector<float>& x, long inputs, const long* columns)
      : part(part), inner(part.rank + EIGHT) {
    if (!part.rank) return;
    __m256 of_x = _mm256_setzero_ps();
    for (long k = 0; k < inputs; k += EIGHT) {
      const __m256 some = _mm256_loadu_ps(x.data() + k);
      of_x = _mm256_fmadd_ps(some, some, of_x);
    }
    const float size = sqrtf(sum_of_eight(of_x) / (float)inputs) * fabsf(part.scale);
    with_rows(part.a_dtype, !columns && part.a_step == 1 && inputs % (2 * EIGHT) == 0, [&](auto of) {
      for (int j = 0; j < part.rank; j++)
        add_rank(j, typename decltype(of)::Type(row_of_a(part, j, inputs, columns)), inputs, x.data(), size);
    });
  }
  // Of outputs [count], up to eight: `rows` of B, and `found`, what a step adds to each.
  void compare(const long* rows, int count, const float* found) {
    with_rows(part.b_dtype, part.b_step == 1 && part.rank % EIGHT == 0 && count == EIGHT,
              [&](auto of) { compare_of<typename decltype(of)::Type>(rows, count, found); });
  }
  // The largest difference, not a number where one is none; the largest sum; and the usual size of one.
  void say(float* out) const {
    out[0] = _mm256_movemask_ps(has_none) ? NAN : largest_of_eight(error);
    out[1] = largest_of_eight(largest), out[2] = largest_inner * largest_of_eight(largest_b);
  }

 private:
  template <class Row> void compare_of(const long* rows, int count, const float* found) {
    __m256 products[EIGHT], largest = largest_b;
    NATIVE_UNROLL
    for (int i = 0; i < EIGHT; i++) {
      products[i] = _mm256_setzero_ps();
      if (i >= count) continue;
      const Row row(row_of_b(part, rows[i]));
      for (long j = 0; j < part.rank; j += EIGHT) {
        const __m256 b = rounded<DTYPE>(row, j);
        products[i] = _mm256_fmadd_ps(b, _mm256_loadu_ps(inner.data() + j), products[i]);
        largest = _mm256_max_ps(largest, without_sign(b));
      }
    }
    largest_b = largest;
    const __m256 sums = sums_of_rows(products);
    note(sums, _mm256_sub_ps(_mm256_loadu_ps(found), sums));
  }
  template <class Row> void add_rank(int j, const Row& row, long inputs, const float* x, float size) {
    __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()}, squares[2] = {sums[0], sums[0]};
    for (long k = 0; k < inputs; k += 2 * EIGHT)
      for (int i = 0; i < 2; i++) {
        const __m256 a = rounded<DTYPE>(row, k + i * EIGHT);
        sums[i] = _mm256_fmadd_ps(a, _mm256_loadu_ps(x + k + i * EIGHT), sums[i]);
        squares[i] = _mm256_fmadd_ps(a, a, squares[i]);
      }
    inner[j] = sum_of_eight(_mm256_add_ps(sums[0], sums[1])) * part.scale;
    largest_inner = std::max(largest_inner, sqrtf(sum_of_eight(_mm256_add_ps(squares[0], squares[1]))) * size);
  }
  void note(__m256 sums, __m256 difference) {
    has_none = _mm256_or_ps(has_none, _mm256_cmp_ps(difference, difference, _CMP_UNORD_Q));
    error = _mm256_max_ps(error, without_sign(difference));
    largest = _mm256_max_ps(largest, without_sign(sums));
  }

  const NativeLowRank& part;
  std::vector<float> inner;  // [ranks, filled up]: scale A x
  float largest_inner = 0;   // usual size of one of them: of as large numbers that do not cancel each other
  __m256 largest_b = _mm256_setzero_ps(), error = largest_b, largest = largest_b, has_none = largest_b;
};

// differences [parts][3], as `Expected::say` has them; zeros of a part that is none.
template <int DTYPE> void prove(const NativeAdaptedSite& s, const NativeAdapted& adapted, float* differences) {
  const long inputs = s.slices * s.slice_length;
  std::vector<float> x(inputs + LANES), found(s.blocks * LANES);
  std::copy(s.probe, s.probe + inputs, x.begin());
  native_added(&adapted, DTYPE, s.filled_probe, s.slices, s.filled_length, s.blocks / 4, found.data());
  std::vector<Expected<DTYPE>> expected;
  for (int p = 0; p < s.num_parts; p++) expected.emplace_back(s.parts[p], x, inputs, s.columns);
  for (long i = 0, next; i < s.outputs; i = next) {
    const long part = s.output_parts[i];
    float own[EIGHT] = {};
    for (next = i; next < s.outputs && next < i + EIGHT && s.output_parts[next] == part; next++)
      own[next - i] = found[s.output_places[next]];
    if (s.parts[part].rank) expected[part].compare(s.output_rows + i, (int)(next - i), own);
  }
  for (int p = 0; p < s.num_parts; p++) expected[p].say(differences + 3 * p);
}

}  // namespace
