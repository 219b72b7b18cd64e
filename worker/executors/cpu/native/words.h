// Sixteen lanes of unsigned 32-bit words and of doubles, and comparisons of float lanes: what draws need beside `lanes.h`.
// What is computed with them does not live here.
#pragma once
#include "lanes.h"

namespace {

#ifdef __AVX512F__

struct Words {
  __m512i v;
};
NATIVE_INLINE Words all_words(uint32_t x) { return {_mm512_set1_epi32((int)x)}; }
// first, first + step, first + 2 step, ...
NATIVE_INLINE Words words_from(uint32_t first, uint32_t step) {
  __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm512_add_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32((int)step)), _mm512_set1_epi32((int)first))};
}
NATIVE_INLINE Words operator+(Words a, Words b) { return {_mm512_add_epi32(a.v, b.v)}; }
NATIVE_INLINE Words operator*(Words a, Words b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
NATIVE_INLINE Words operator^(Words a, Words b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int N> NATIVE_INLINE Words right(Words a) { return {_mm512_srli_epi32(a.v, N)}; }
NATIVE_INLINE void store(uint32_t* p, Words a) { _mm512_storeu_si512(p, a.v); }
// Words below 2^31 as numbers, and the bits of numbers as words.
NATIVE_INLINE Lanes numbers(Words a) { return {_mm512_cvtepi32_ps(a.v)}; }
NATIVE_INLINE Words bits_of(Lanes a) { return {_mm512_castps_si512(a.v)}; }
// A bit for each lane, the first one the lowest.
NATIVE_INLINE unsigned mask_at_least(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
NATIVE_INLINE unsigned mask_above(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
NATIVE_INLINE unsigned mask_equal(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
// a where y >= limit, or y > limit, else 0.
NATIVE_INLINE Lanes kept_at_least(Lanes y, Lanes limit, Lanes a) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y.v, limit.v, _CMP_GE_OQ), a.v)};
}
NATIVE_INLINE Lanes kept_above(Lanes y, Lanes limit, Lanes a) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y.v, limit.v, _CMP_GT_OQ), a.v)};
}
// a in the lanes of a mask, else other.
NATIVE_INLINE Lanes kept_in(unsigned mask, Lanes a, Lanes other) {
  return {_mm512_mask_mov_ps(other.v, (__mmask16)mask, a.v)};
}
// The lanes of a mask, in a row from p on, where sixteen have room. Returns their number.
NATIVE_INLINE int pack(float* p, unsigned mask, Lanes a) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps((__mmask16)mask, a.v));
  return __builtin_popcount(mask);
}

struct Counts {
  __m512i v;
};
NATIVE_INLINE Counts no_counts() { return {_mm512_setzero_si512()}; }
NATIVE_INLINE void count_above(Counts& n, Lanes a, Lanes b) {
  n.v = _mm512_mask_add_epi32(n.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ), n.v, _mm512_set1_epi32(1));
}
NATIVE_INLINE void count_at_least(Counts& n, Lanes a, Lanes b) {
  n.v = _mm512_mask_add_epi32(n.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ), n.v, _mm512_set1_epi32(1));
}
NATIVE_INLINE int sum_of(Counts n) { return _mm512_reduce_add_epi32(n.v); }

struct Doubles {
  __m512d low, high;
};
NATIVE_INLINE Doubles no_doubles() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
NATIVE_INLINE void add(Doubles& sum, Lanes a) {
  sum.low = _mm512_add_pd(sum.low, _mm512_cvtps_pd(low_half(a)));
  sum.high = _mm512_add_pd(sum.high, _mm512_cvtps_pd(high_half(a)));
}
NATIVE_INLINE void store(double* p, Doubles a) { _mm512_storeu_pd(p, a.low), _mm512_storeu_pd(p + 8, a.high); }

#else

struct Words {
  __m256i a, b;
};
NATIVE_INLINE Words all_words(uint32_t x) { return {_mm256_set1_epi32((int)x), _mm256_set1_epi32((int)x)}; }
NATIVE_INLINE Words words_from(uint32_t first, uint32_t step) {
  __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), by = _mm256_set1_epi32((int)step);
  __m256i low = _mm256_add_epi32(_mm256_mullo_epi32(lane, by), _mm256_set1_epi32((int)first));
  return {low, _mm256_add_epi32(low, _mm256_slli_epi32(by, 3))};
}
NATIVE_INLINE Words operator+(Words x, Words y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
NATIVE_INLINE Words operator*(Words x, Words y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
NATIVE_INLINE Words operator^(Words x, Words y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
template <int N> NATIVE_INLINE Words right(Words x) { return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)}; }
NATIVE_INLINE void store(uint32_t* p, Words x) {
  _mm256_storeu_si256((__m256i*)p, x.a), _mm256_storeu_si256((__m256i*)(p + 8), x.b);
}
NATIVE_INLINE Lanes numbers(Words x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
NATIVE_INLINE Words bits_of(Lanes x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
NATIVE_INLINE unsigned both_masks(__m256 a, __m256 b) {
  return (unsigned)_mm256_movemask_ps(a) | (unsigned)_mm256_movemask_ps(b) << 8;
}
NATIVE_INLINE unsigned mask_at_least(Lanes x, Lanes y) {
  return both_masks(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ));
}
NATIVE_INLINE unsigned mask_above(Lanes x, Lanes y) {
  return both_masks(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ));
}
NATIVE_INLINE unsigned mask_equal(Lanes x, Lanes y) {
  return both_masks(_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ));
}
NATIVE_INLINE Lanes kept_at_least(Lanes y, Lanes limit, Lanes x) {
  return {_mm256_and_ps(_mm256_cmp_ps(y.a, limit.a, _CMP_GE_OQ), x.a),
          _mm256_and_ps(_mm256_cmp_ps(y.b, limit.b, _CMP_GE_OQ), x.b)};
}
NATIVE_INLINE Lanes kept_above(Lanes y, Lanes limit, Lanes x) {
  return {_mm256_and_ps(_mm256_cmp_ps(y.a, limit.a, _CMP_GT_OQ), x.a),
          _mm256_and_ps(_mm256_cmp_ps(y.b, limit.b, _CMP_GT_OQ), x.b)};
}
NATIVE_INLINE __m256 mask_lanes(unsigned mask) {
  __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)mask), bit), bit));
}
NATIVE_INLINE Lanes kept_in(unsigned mask, Lanes x, Lanes other) {
  return {_mm256_blendv_ps(other.a, x.a, mask_lanes(mask)), _mm256_blendv_ps(other.b, x.b, mask_lanes(mask >> 8))};
}

// For each mask of eight lanes the numbers of those that are in it, in a row.
struct PackedLanes {
  alignas(8) uint8_t lanes[256][8];
  constexpr PackedLanes() : lanes() {
    for (int mask = 0; mask < 256; mask++)
      for (int lane = 0, at = 0; lane < 8; lane++)
        if (mask >> lane & 1) lanes[mask][at++] = (uint8_t)lane;
  }
};
constexpr PackedLanes PACKED_LANES;
NATIVE_INLINE int pack_half(float* p, unsigned mask, __m256 x) {
  __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)PACKED_LANES.lanes[mask]));
  _mm256_storeu_ps(p, _mm256_permutevar8x32_ps(x, order));
  return __builtin_popcount(mask);
}
NATIVE_INLINE int pack(float* p, unsigned mask, Lanes x) {
  int low = pack_half(p, mask & 0xff, x.a);
  return low + pack_half(p + low, mask >> 8, x.b);
}

struct Counts {
  __m256i v;
};
NATIVE_INLINE Counts no_counts() { return {_mm256_setzero_si256()}; }
NATIVE_INLINE __m256i minus_ones(__m256i n, __m256 a, __m256 b) {
  return _mm256_sub_epi32(_mm256_sub_epi32(n, _mm256_castps_si256(a)), _mm256_castps_si256(b));
}
NATIVE_INLINE void count_above(Counts& n, Lanes x, Lanes y) {
  n.v = minus_ones(n.v, _mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ));
}
NATIVE_INLINE void count_at_least(Counts& n, Lanes x, Lanes y) {
  n.v = minus_ones(n.v, _mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ));
}
NATIVE_INLINE int sum_of(Counts n) {
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(n.v), _mm256_extracti128_si256(n.v, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}

struct Doubles {
  __m256d v[4];
};
NATIVE_INLINE Doubles no_doubles() {
  __m256d zeros = _mm256_setzero_pd();
  return {{zeros, zeros, zeros, zeros}};
}
NATIVE_INLINE void add(Doubles& sum, Lanes x) {
  sum.v[0] = _mm256_add_pd(sum.v[0], _mm256_cvtps_pd(_mm256_castps256_ps128(x.a)));
  sum.v[1] = _mm256_add_pd(sum.v[1], _mm256_cvtps_pd(_mm256_extractf128_ps(x.a, 1)));
  sum.v[2] = _mm256_add_pd(sum.v[2], _mm256_cvtps_pd(_mm256_castps256_ps128(x.b)));
  sum.v[3] = _mm256_add_pd(sum.v[3], _mm256_cvtps_pd(_mm256_extractf128_ps(x.b, 1)));
}
NATIVE_INLINE void store(double* p, Doubles x) {
  for (int i = 0; i < 4; i++) _mm256_storeu_pd(p + 4 * i, x.v[i]);
}

#endif

// The sum of all lanes, in one order on every machine.
NATIVE_INLINE double sum_of(Doubles a) {
  double v[16];
  store(v, a);
  for (int apart = 8; apart; apart /= 2)
    for (int i = 0; i < apart; i++) v[i] = v[i] + v[i + apart];
  return v[0];
}

// The natural logarithm of a normal number above 0, to less than 1 ulp: fdlibm's method, in one order on every machine.
NATIVE_INLINE double log_of(double x) {
  uint64_t bits;
  memcpy(&bits, &x, 8);
  int k = (int)(bits >> 52) - 1023;
  bits &= 0xfffffffffffffULL;
  uint64_t up = (bits + 0x95f6400000000ULL) & 0x10000000000000ULL;  // from the square root of 2 on: half of it
  bits |= up ^ 0x3ff0000000000000ULL;
  k += (int)(up >> 52);
  memcpy(&x, &bits, 8);
  double f = x - 1.0, s = f / (2.0 + f), z = s * s, w = z * z;
  double even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
  double odd = z * (6.666666666666735130e-01 +
                    w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
  double half = 0.5 * f * f, r = s * (half + (even + odd));
  return k * 6.93147180369123816490e-01 - ((half - (r + k * 1.90821492927058770002e-10)) - f);
}

}  // namespace
