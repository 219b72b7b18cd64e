// Sixteen float lanes with the same bits on AVX-512 and on AVX2 with FMA.
// Only IEEE operations, explicit fused multiply-adds and reductions of a fixed order live here; what is computed with
// them does not. Denormals are flushed (the caller sets the control register), as AMX's tile unit does.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define NATIVE_INLINE static inline __attribute__((always_inline))
#define NATIVE_INLINE_MEMBER inline __attribute__((always_inline))
// Of loops over numbers of which each is in a register.
#define NATIVE_UNROLL _Pragma("GCC unroll 16")

namespace {

struct Bf16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

#ifdef __AVX512F__

struct Lanes {
  __m512 v;
};

NATIVE_INLINE Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
NATIVE_INLINE void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
NATIVE_INLINE Lanes all(float x) { return {_mm512_set1_ps(x)}; }
NATIVE_INLINE Lanes zero() { return {_mm512_setzero_ps()}; }
NATIVE_INLINE Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
NATIVE_INLINE Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
NATIVE_INLINE Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
NATIVE_INLINE Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
NATIVE_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
NATIVE_INLINE Lanes minus_fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
NATIVE_INLINE Lanes larger(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
NATIVE_INLINE Lanes smaller(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
NATIVE_INLINE Lanes rounded(Lanes a) { return {_mm512_roundscale_ps(a.v, 8)}; }
// The nearest whole number, and what is left. What is below -128 may become -128.
NATIVE_INLINE Lanes split(Lanes a, Lanes& rest) {
  rest = {_mm512_reduce_ps(a.v, 8)};
  return {_mm512_sub_ps(a.v, rest.v)};
}
NATIVE_INLINE Lanes absolute(Lanes a) { return {_mm512_abs_ps(a.v)}; }
NATIVE_INLINE Lanes with_sign_of(Lanes a, Lanes sign) {
  __m512i mask = _mm512_set1_epi32(0x80000000);
  return {_mm512_castsi512_ps(
      _mm512_ternarylogic_epi32(mask, _mm512_castps_si512(sign.v), _mm512_castps_si512(a.v), 0xca))};
}
// a * 2^n for whole n up to 127 and a of 0.7 to 1.42; 0 where it is below the smallest normal number.
NATIVE_INLINE Lanes times_power(Lanes a, Lanes n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// a where y > limit (in each lane), else b.
NATIVE_INLINE Lanes where_above(Lanes y, Lanes limit, Lanes a, Lanes b) {
  return {_mm512_mask_mov_ps(b.v, _mm512_cmp_ps_mask(y.v, limit.v, _CMP_GT_OQ), a.v)};
}
// A bit for each lane in which both are equal.
NATIVE_INLINE unsigned equal_lanes(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
// a in lanes [first, end), other elsewhere.
NATIVE_INLINE Lanes keep_range(Lanes a, int first, int end, Lanes other) {
  unsigned below_end = end >= 16 ? 0xffff : end <= 0 ? 0 : (1u << end) - 1;
  unsigned below_first = first >= 16 ? 0xffff : first <= 0 ? 0 : (1u << first) - 1;
  return {_mm512_mask_mov_ps(other.v, (__mmask16)(below_end & ~below_first), a.v)};
}
NATIVE_INLINE __m256 low_half(Lanes a) { return _mm512_castps512_ps256(a.v); }
NATIVE_INLINE __m256 high_half(Lanes a) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)); }
NATIVE_INLINE Lanes load(const Bf16* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
NATIVE_INLINE Lanes load(const Half* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
// Rounds to the nearest, ties to even; NaN stays NaN.
#ifdef __AVX512BF16__
NATIVE_INLINE void store(Bf16* p, Lanes a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v)); }
#else
NATIVE_INLINE void store(Bf16* p, Lanes a) {
  __m512i bits = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd));
  __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  up = _mm512_mask_mov_epi32(up, is_nan, _mm512_set1_epi32(0x7fc00000));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
}
#endif
NATIVE_INLINE void store(Half* p, Lanes a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// 16 numbers of 16 bits, to every other place from `at` on; what lies between stays.
NATIVE_INLINE void store_apart(void* at, const void* words) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)words));
  _mm512_mask_storeu_epi16(at, 0x55555555, wide);
}

// One register of a packed tile: as wide as the machine has it.
enum { WIDTH = 16 };
typedef __m512 Wide;
NATIVE_INLINE Wide wide_load(const float* p) { return _mm512_loadu_ps(p); }
NATIVE_INLINE void wide_store(float* p, Wide a) { _mm512_storeu_ps(p, a); }
NATIVE_INLINE Wide wide_all(const float* p) { return _mm512_set1_ps(*p); }
NATIVE_INLINE Wide wide_zero() { return _mm512_setzero_ps(); }
NATIVE_INLINE Wide wide_add(Wide a, Wide b) { return _mm512_add_ps(a, b); }
NATIVE_INLINE Wide wide_times(Wide a, Wide b) { return _mm512_mul_ps(a, b); }
NATIVE_INLINE Wide wide_fma(Wide a, Wide b, Wide c) { return _mm512_fmadd_ps(a, b, c); }
// Columns `c` onwards of row pair `p` of a tile: the elements of even k and of odd k.
NATIVE_INLINE Wide even_of(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
NATIVE_INLINE Wide odd_of(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)));
}
NATIVE_INLINE Wide even_of(const Bf16* p) { return even_of(_mm512_loadu_si512(p)); }
NATIVE_INLINE Wide odd_of(const Bf16* p) { return odd_of(_mm512_loadu_si512(p)); }
NATIVE_INLINE Wide even_of(const Half* p) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_loadu_si512(p))); }
NATIVE_INLINE Wide odd_of(const Half* p) {
  return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_loadu_si512(p), 16)));
}

#ifdef NATIVE_PAIRS
// Registers of pairs of bf16, and sums to which the products of the upper halves are added, then those of the lower ones.
typedef __m512i WidePairs;
NATIVE_INLINE WidePairs pairs_load(const void* p) { return _mm512_loadu_si512(p); }
NATIVE_INLINE WidePairs pairs_all(uint32_t pair) { return _mm512_set1_epi32((int)pair); }
NATIVE_INLINE Wide wide_two_products(Wide sum, WidePairs x, WidePairs w) {
  return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
}
#endif

#else  // AVX2 with FMA and F16C

struct Lanes {
  __m256 a, b;
};
#define NATIVE_BOTH(low, high) \
  { return {low, high}; }

NATIVE_INLINE Lanes load(const float* p) NATIVE_BOTH(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)) NATIVE_INLINE
    void store(float* p, Lanes x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
NATIVE_INLINE Lanes all(float x) NATIVE_BOTH(_mm256_set1_ps(x), _mm256_set1_ps(x)) NATIVE_INLINE Lanes zero()
    NATIVE_BOTH(_mm256_setzero_ps(), _mm256_setzero_ps()) NATIVE_INLINE Lanes operator+(Lanes x, Lanes y)
        NATIVE_BOTH(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)) NATIVE_INLINE Lanes operator-(Lanes x, Lanes y)
            NATIVE_BOTH(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)) NATIVE_INLINE Lanes operator*(Lanes x,
                                                                                                        Lanes y)
                NATIVE_BOTH(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)) NATIVE_INLINE Lanes operator/(Lanes x,
                                                                                                            Lanes y)
                    NATIVE_BOTH(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)) NATIVE_INLINE Lanes
    fma(Lanes x, Lanes y, Lanes z)
        NATIVE_BOTH(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)) NATIVE_INLINE Lanes
    minus_fma(Lanes x, Lanes y, Lanes z)
        NATIVE_BOTH(_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)) NATIVE_INLINE Lanes
    larger(Lanes x, Lanes y) NATIVE_BOTH(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)) NATIVE_INLINE Lanes
    smaller(Lanes x, Lanes y) NATIVE_BOTH(_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)) NATIVE_INLINE Lanes
    rounded(Lanes x) NATIVE_BOTH(_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)) NATIVE_INLINE __m256 sign_mask() {
  return _mm256_set1_ps(-0.0f);
}
NATIVE_INLINE Lanes absolute(Lanes x)
    NATIVE_BOTH(_mm256_andnot_ps(sign_mask(), x.a), _mm256_andnot_ps(sign_mask(), x.b)) NATIVE_INLINE __m256
    signed8(__m256 x, __m256 sign) {
  return _mm256_or_ps(_mm256_andnot_ps(sign_mask(), x), _mm256_and_ps(sign_mask(), sign));
}
NATIVE_INLINE Lanes with_sign_of(Lanes x, Lanes s)
    NATIVE_BOTH(signed8(x.a, s.a), signed8(x.b, s.b)) NATIVE_INLINE __m256 times_power8(__m256 x, __m256 n) {
  // In two steps, so that 2^n is a normal number; the second one flushes what is too small.
  __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
  __m256i bias = _mm256_set1_epi32(127);
  x = _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
NATIVE_INLINE Lanes times_power(Lanes x, Lanes n)
    NATIVE_BOTH(times_power8(x.a, n.a), times_power8(x.b, n.b)) NATIVE_INLINE __m256
    where_above8(__m256 y, __m256 limit, __m256 a, __m256 b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(y, limit, _CMP_GT_OQ));
}
NATIVE_INLINE Lanes where_above(Lanes y, Lanes limit, Lanes a, Lanes b)
    NATIVE_BOTH(where_above8(y.a, limit.a, a.a, b.a), where_above8(y.b, limit.b, a.b, b.b)) NATIVE_INLINE __m256
    keep_range8(__m256 x, int first, int end, __m256 other) {
  __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256i before_end = _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane);
  __m256i before_first = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(_mm256_andnot_si256(before_first, before_end)));
}
NATIVE_INLINE Lanes keep_range(Lanes x, int first, int end, Lanes other)
    NATIVE_BOTH(keep_range8(x.a, first, end, other.a),
                keep_range8(x.b, first - 8, end - 8, other.b)) NATIVE_INLINE __m256 low_half(Lanes x) {
  return x.a;
}
NATIVE_INLINE __m256 high_half(Lanes x) { return x.b; }
NATIVE_INLINE unsigned equal_lanes(Lanes x, Lanes y) {
  unsigned lower = (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ));
  return lower | (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ)) << 8;
}
NATIVE_INLINE __m256 widened(const Bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
NATIVE_INLINE Lanes load(const Bf16* p) NATIVE_BOTH(widened(p), widened(p + 8)) NATIVE_INLINE __m256
    widened(const Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
NATIVE_INLINE Lanes load(const Half* p) NATIVE_BOTH(widened(p), widened(p + 8)) NATIVE_INLINE __m256i
    to_bf16(__m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd));
  __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  up = _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), is_nan);
  return _mm256_srli_epi32(up, 16);
}
NATIVE_INLINE void store(Bf16* p, Lanes x) {
  __m256i both = _mm256_packus_epi32(to_bf16(x.a), to_bf16(x.b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(both, 0xd8));
}
NATIVE_INLINE void store(Half* p, Lanes x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

NATIVE_INLINE Lanes split(Lanes x, Lanes& rest) {
  Lanes clamped = larger(all(-128.0f), x), whole = rounded(clamped);  // below it 2^x is 0
  rest = clamped - whole;
  return whole;
}

NATIVE_INLINE void store_apart(void* at, const void* words) {
  for (int i = 0; i < 16; i++) memcpy((char*)at + 4 * i, (const char*)words + 2 * i, 2);
}

enum { WIDTH = 8 };
typedef __m256 Wide;
NATIVE_INLINE Wide wide_load(const float* p) { return _mm256_loadu_ps(p); }
NATIVE_INLINE void wide_store(float* p, Wide a) { _mm256_storeu_ps(p, a); }
NATIVE_INLINE Wide wide_all(const float* p) { return _mm256_broadcast_ss(p); }
NATIVE_INLINE Wide wide_zero() { return _mm256_setzero_ps(); }
NATIVE_INLINE Wide wide_add(Wide a, Wide b) { return _mm256_add_ps(a, b); }
NATIVE_INLINE Wide wide_times(Wide a, Wide b) { return _mm256_mul_ps(a, b); }
// The bfloat16 that is nearest, ties to even, of numbers that are no NaN.
NATIVE_INLINE Wide kept_in_bf16(Wide x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  return _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32((int)0xffff0000)));
}
NATIVE_INLINE Wide wide_fma(Wide a, Wide b, Wide c) { return _mm256_fmadd_ps(a, b, c); }
NATIVE_INLINE Wide even_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
NATIVE_INLINE Wide odd_of(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000)));
}
NATIVE_INLINE Wide even_of(const Bf16* p) { return even_of(_mm256_loadu_si256((const __m256i*)p)); }
NATIVE_INLINE Wide odd_of(const Bf16* p) { return odd_of(_mm256_loadu_si256((const __m256i*)p)); }
#ifdef NATIVE_PAIRS  // as where the machine has an instruction for two products, for tests
typedef __m256i WidePairs;
NATIVE_INLINE WidePairs pairs_load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
NATIVE_INLINE WidePairs pairs_all(uint32_t pair) { return _mm256_set1_epi32((int)pair); }
NATIVE_INLINE Wide upper_of(WidePairs a) {
  return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32(0xffff0000)));
}
NATIVE_INLINE Wide lower_of(WidePairs a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
NATIVE_INLINE Wide wide_two_products(Wide sum, WidePairs x, WidePairs w) {
  return wide_fma(lower_of(x), lower_of(w), wide_fma(upper_of(x), upper_of(w), sum));
}
#endif
NATIVE_INLINE __m128i low_words(__m256i x) {
  __m256i words = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
  return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
NATIVE_INLINE Wide even_of(const Half* p) { return _mm256_cvtph_ps(low_words(_mm256_loadu_si256((const __m256i*)p))); }
NATIVE_INLINE Wide odd_of(const Half* p) {
  return _mm256_cvtph_ps(low_words(_mm256_srli_epi32(_mm256_loadu_si256((const __m256i*)p), 16)));
}

#endif

NATIVE_INLINE Wide even_of(const float* p) { return wide_load(p); }
NATIVE_INLINE Wide odd_of(const float* p) { return wide_load(p + 16); }

// The first `left` of sixteen numbers, zeros behind them; all sixteen are readable.
NATIVE_INLINE Lanes tail_of(const float* p, int left) {
  return left >= 16 ? load(p) : keep_range(load(p), 0, left, zero());
}

NATIVE_INLINE float sum4(__m128 q) {
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
NATIVE_INLINE float sum_of(Lanes a) {
  __m256 h = _mm256_add_ps(low_half(a), high_half(a));
  return sum4(_mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
}
NATIVE_INLINE float largest_of(Lanes a) {
  __m256 h = _mm256_max_ps(low_half(a), high_half(a));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
NATIVE_INLINE Lanes largest_one_by_one(const Lanes* rows, int count) {
  alignas(64) float out[16] = {};
  for (int i = 0; i < count; i++) out[i] = largest_of(rows[i]);
  return load(out);
}
// The largest lane of each of up to sixteen; lanes behind are of no meaning.
#ifdef __AVX512F__
NATIVE_INLINE Lanes largest_of_each(Lanes* rows, int count) {
  if (count < 6) return largest_one_by_one(rows, count);
  for (int i = count; i < 16; i++) rows[i] = zero();
  __m512 eights[8], fours[4], twos[2];
  for (int i = 0; i < 8; i++) {
    __m512 a = rows[i].v, b = rows[i + 8].v;
    eights[i] = _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
  for (int i = 0; i < 4; i++)
    fours[i] = _mm512_max_ps(_mm512_shuffle_f32x4(eights[i], eights[i + 4], 0x88),
                             _mm512_shuffle_f32x4(eights[i], eights[i + 4], 0xdd));
  for (int i = 0; i < 2; i++)
    twos[i] =
        _mm512_max_ps(_mm512_shuffle_ps(fours[i], fours[i + 2], 0x44), _mm512_shuffle_ps(fours[i], fours[i + 2], 0xee));
  __m512 ones = _mm512_max_ps(_mm512_shuffle_ps(twos[0], twos[1], 0x88), _mm512_shuffle_ps(twos[0], twos[1], 0xdd));
  // Its lane 4 q + p is of row 8 (q % 2) + 4 (q / 2) + 2 (p % 2) + p / 2.
  const __m512i place = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return {_mm512_permutexvar_ps(place, ones)};
}
#else
NATIVE_INLINE Lanes largest_of_each(Lanes* rows, int count) { return largest_one_by_one(rows, count); }
#endif
NATIVE_INLINE float scalar_fma(float a, float b, float c) {
  return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
}
NATIVE_INLINE double scalar_fma(double a, double b, double c) {
  return _mm_cvtsd_f64(_mm_fmadd_sd(_mm_set_sd(a), _mm_set_sd(b), _mm_set_sd(c)));
}
NATIVE_INLINE float square_root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

}  // namespace
