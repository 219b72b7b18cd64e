// Rows in units: how the numbers of a row's units are quantized, by the rule of `units.h`, and how they lie in memory.
#pragma once
#include <math.h>

#include "units.h"

namespace {

enum { LINE_INPUTS = 4, FAR_BITS = 7, FAR = 1 << FAR_BITS, FAR_FROM = 2 };  // of a row's unit

// A unit of a row, for weights of any form.
struct RowUnit {
  int8_t q[UNIT];           // whole numbers; of the far line, what is left of them beside times of FAR
  int8_t far[LINE_INPUTS];  // those of the far line, in times of FAR
  int16_t has_far, line;    // whether there is a far line, and which one
  float scale, scaled_sum;
  int32_t parted_sum;                   // of q, and of `far` in its upper word
  int32_t sum_8, first_sum_8, sum_128;  // the middle of codes of 4 and of 8 bits times the sum; of the first half
#ifndef NATIVE_VNNI
  int16_t words[UNIT];  // whole numbers, those of the far line whole; of each line inputs 0, 2, 1 and 3
#endif
};

NATIVE_INLINE __m256i magnitudes(__m256 v) {
  return _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff));
}
NATIVE_INLINE uint32_t largest_of(__m256i most) {  // as bits, in whose order NaN comes last
  __m128i q = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return (uint32_t)_mm_cvtsi128_si32(_mm_max_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
// The largest magnitude of each line of a unit.
NATIVE_INLINE __m256i largest_of_lines(Lanes a, Lanes b) {
  const __m256i v[4] = {magnitudes(low_half(a)), magnitudes(high_half(a)), magnitudes(low_half(b)),
                        magnitudes(high_half(b))};
  const __m256i x = _mm256_max_epi32(_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));
  const __m256i y = _mm256_max_epi32(_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));
  const __m256i most = _mm256_max_epi32(_mm256_unpacklo_epi64(x, y), _mm256_unpackhi_epi64(x, y));
  return _mm256_permutevar8x32_epi32(most, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
NATIVE_INLINE float float_of(uint32_t bits) {
  float number;
  memcpy(&number, &bits, 4);
  return number;
}

// Eight numbers as whole ones, rounded to even.
NATIVE_INLINE __m256i whole(__m256 v, __m256 factor) { return _mm256_cvtps_epi32(_mm256_mul_ps(v, factor)); }

NATIVE_INLINE int32_t sum_of_words(__m256i words) {
  const __m256i sums = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

// Parts the whole numbers of the far line; returns the sum of its parts in times of FAR.
inline int32_t part_far_line(const __m256i (&words)[2], RowUnit& out) {
  alignas(32) int16_t numbers[UNIT];  // lines 0, 2, 1, 3, 4, 6, 5, 7
  _mm256_store_si256((__m256i*)numbers, words[0]);
  _mm256_store_si256((__m256i*)(numbers + UNIT / 2), words[1]);
  const int line = out.line, place = (line & 4) | (line & 1) << 1 | (line & 2) >> 1;
  const __m128i x = _mm_loadl_epi64((const __m128i*)(numbers + place * LINE_INPUTS));
  const __m128i far = _mm_srai_epi16(_mm_add_epi16(x, _mm_set1_epi16(FAR / 2)), FAR_BITS);
  const __m128i near = _mm_sub_epi16(x, _mm_slli_epi16(far, FAR_BITS));
  const int near_bytes = _mm_cvtsi128_si32(_mm_packs_epi16(near, near));
  const int far_bytes = _mm_cvtsi128_si32(_mm_packs_epi16(far, far));
  memcpy(out.q + line * LINE_INPUTS, &near_bytes, 4);
  memcpy(out.far, &far_bytes, 4);
  return out.far[0] + out.far[1] + out.far[2] + out.far[3];
}

#ifndef NATIVE_VNNI
// Of numbers 0 to 15 or 16 to 31 of a unit, in lines 0, 2, 1, 3.
NATIVE_INLINE void store_words(__m256i words, int16_t* out) {
  const __m256i in_lines = _mm256_permute4x64_epi64(words, 0xd8);
  _mm256_storeu_si256((__m256i*)out, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(in_lines, 0xd8), 0xd8));
}
#endif

// Whole numbers of a unit, and its words: of numbers 0 to 15 and 16 to 31, in lines 0, 2, 1, 3.
NATIVE_INLINE void store_bytes(__m256i first, __m256i second, RowUnit& out) {
  const __m256i q = _mm256_packs_epi16(first, second), in_lines = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256((__m256i*)out.q, _mm256_permutevar8x32_epi32(q, in_lines));
#ifndef NATIVE_VNNI
  store_words(first, out.words), store_words(second, out.words + UNIT / 2);
#endif
}

// What a unit without a far line has beside its numbers, by its sum and that of its first half.
NATIVE_INLINE void without_far_line(float scale, int first, int sum, RowUnit& out) {
  memset(out.far, 0, sizeof out.far);
  out.has_far = out.line = 0;
  out.scale = scale;
  out.scaled_sum = scale * (float)sum;
  out.parted_sum = sum & 0xffff;
  out.sum_8 = sum * 8, out.first_sum_8 = first * 8, out.sum_128 = sum * 128;
}

const uint32_t INFINITE = 0x7f800000, TINY = 0x0d800000;  // 2^-100

// Of inputs 0 to 15 and 16 to 31, whatever they are.
inline void quantize_any_unit(Lanes a, Lanes b, RowUnit& out) {
  const __m256i of_lines = largest_of_lines(a, b);
  const uint32_t bits = largest_of(of_lines);
  if (__builtin_expect(bits >= INFINITE || bits < TINY, 0)) {
    memset(&out, 0, sizeof out);
    if (bits >= INFINITE) out.scale = out.scaled_sum = NAN;
    return;
  }
  out.line = __builtin_ctz(
      _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(of_lines, _mm256_set1_epi32((int)bits)))));
  const __m256i is_far = _mm256_cmpeq_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(out.line));
  const float rest = float_of(largest_of(_mm256_andnot_si256(is_far, of_lines)));
  const float largest = float_of(bits);
  out.has_far = largest >= FAR_FROM * rest;
  const float base = out.has_far ? std::max(rest, largest / FAR) : largest;
  const __m256 factor = _mm256_set1_ps(127.0f / base);
  const __m256i v[4] = {whole(low_half(a), factor), whole(high_half(a), factor), whole(low_half(b), factor),
                        whole(high_half(b), factor)};
  const __m256i words[2] = {_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3])};
  store_bytes(words[0], words[1], out);
  if (!out.has_far) memset(out.far, 0, sizeof out.far);
  const int32_t far_sum = out.has_far ? part_far_line(words, out) : 0;
  const int32_t first = sum_of_words(words[0]), sum = first + sum_of_words(words[1]);
  out.parted_sum = ((sum - FAR * far_sum) & 0xffff) | (int32_t)((uint32_t)far_sum << 16);
  out.sum_8 = sum * 8, out.first_sum_8 = first * 8, out.sum_128 = sum * 128;
  out.scale = base / 127.0f;
  out.scaled_sum = out.scale * (float)sum;
}

#ifdef __AVX512F__
#ifndef NATIVE_VNNI
NATIVE_INLINE void store_words_of_bytes(__m128i bytes, int16_t* out) {
  const __m256i words = _mm256_cvtepi8_epi16(bytes);
  _mm256_storeu_si256((__m256i*)out, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8));
}
#endif
// Of a unit without a far line whose numbers are neither odd nor all tiny; false: it is another one.
NATIVE_INLINE bool quantize_plain_unit(Lanes a, Lanes b, RowUnit& out) {
  const __m512i sign = _mm512_set1_epi32(0x7fffffff);
  const __m512i x = _mm512_and_si512(_mm512_castps_si512(a.v), sign);
  const __m512i y = _mm512_and_si512(_mm512_castps_si512(b.v), sign);
  __m512i lines = _mm512_max_epi32(_mm512_unpacklo_epi32(x, y), _mm512_unpackhi_epi32(x, y));
  lines = _mm512_max_epi32(lines, _mm512_shuffle_epi32(lines, _MM_PERM_BADC));  // a's in lane 4i, b's in 4i + 1
  __m512i most = _mm512_max_epi32(lines, _mm512_shuffle_i64x2(lines, lines, 0x4e));
  most = _mm512_max_epi32(most, _mm512_shuffle_i64x2(most, most, 0xb1));
  const __m512 largest = _mm512_castsi512_ps(_mm512_max_epi32(most, _mm512_shuffle_epi32(most, _MM_PERM_CDAB)));
  const uint32_t bits = (uint32_t)_mm512_cvtsi512_si32(_mm512_castps_si512(largest));
  const __m512 half = _mm512_mul_ps(largest, _mm512_set1_ps(1.0f / FAR_FROM));
  const unsigned above = _mm512_cmp_ps_mask(_mm512_castsi512_ps(lines), half, _CMP_GT_OQ) & 0x3333;
  if (__builtin_expect(bits - TINY >= INFINITE - TINY || !(above & (above - 1)), 0)) return false;

  const __m128 base = _mm512_castps512_ps128(largest), steps = _mm_set1_ps(127.0f);
  const __m128 scales = _mm_div_ps(_mm_unpacklo_ps(steps, base), _mm_unpacklo_ps(base, steps));
  const __m512 factor = _mm512_broadcastss_ps(scales);
  const __m128i p = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(a.v, factor)));
  const __m128i q = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(b.v, factor)));
  _mm_storeu_si128((__m128i*)out.q, p), _mm_storeu_si128((__m128i*)out.q + 1, q);
  const __m128i flip = _mm_set1_epi8(-128), none = _mm_setzero_si128();  // sums of bytes without signs
  const __m128i of_p = _mm_sad_epu8(_mm_xor_si128(p, flip), none), of_q = _mm_sad_epu8(_mm_xor_si128(q, flip), none);
  const __m128i sums = _mm_add_epi64(_mm_unpacklo_epi64(of_p, of_q), _mm_unpackhi_epi64(of_p, of_q));
  const int first = _mm_cvtsi128_si32(sums) - UNIT / 2 * 128, sum = first + _mm_extract_epi32(sums, 2) - UNIT / 2 * 128;
  without_far_line(_mm_cvtss_f32(_mm_shuffle_ps(scales, scales, 1)), first, sum, out);
#ifndef NATIVE_VNNI
  store_words_of_bytes(p, out.words), store_words_of_bytes(q, out.words + UNIT / 2);
#endif
  return true;
}
#else
// The same, by the same rule.
NATIVE_INLINE bool quantize_plain_unit(Lanes a, Lanes b, RowUnit& out) {
  const __m256i of_lines = largest_of_lines(a, b);
  __m256i most = _mm256_max_epi32(of_lines, _mm256_permute2x128_si256(of_lines, of_lines, 1));
  most = _mm256_max_epi32(most, _mm256_shuffle_epi32(most, 0x4e));
  const __m256 largest = _mm256_castsi256_ps(_mm256_max_epi32(most, _mm256_shuffle_epi32(most, 0xb1)));
  const uint32_t bits = (uint32_t)_mm_cvtsi128_si32(_mm256_castsi256_si128(_mm256_castps_si256(largest)));
  const __m256 half = _mm256_mul_ps(largest, _mm256_set1_ps(1.0f / FAR_FROM));
  const int above = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_castsi256_ps(of_lines), half, _CMP_GT_OQ));
  if (__builtin_expect(bits - TINY >= INFINITE - TINY || !(above & (above - 1)), 0)) return false;

  const __m128 base = _mm256_castps256_ps128(largest), steps = _mm_set1_ps(127.0f);
  const __m128 scales = _mm_div_ps(_mm_unpacklo_ps(steps, base), _mm_unpacklo_ps(base, steps));
  const __m256 factor = _mm256_broadcastss_ps(scales);
  const __m256i p = _mm256_packs_epi32(whole(low_half(a), factor), whole(high_half(a), factor));
  const __m256i q = _mm256_packs_epi32(whole(low_half(b), factor), whole(high_half(b), factor));
  store_bytes(p, q, out);
  const __m256i ones = _mm256_set1_epi16(1);
  const __m256i both = _mm256_hadd_epi32(_mm256_madd_epi16(p, ones), _mm256_madd_epi16(q, ones));
  __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xb1));
  const int first = _mm_cvtsi128_si32(sums), sum = first + _mm_extract_epi32(sums, 2);
  without_far_line(_mm_cvtss_f32(_mm_shuffle_ps(scales, scales, 1)), first, sum, out);
  return true;
}
#endif

NATIVE_INLINE void quantize_unit(Lanes a, Lanes b, RowUnit& out) {
  if (!quantize_plain_unit(a, b, out)) quantize_any_unit(a, b, out);
}

// out [units] = a row [units * 32] of a linear's inputs.
template <class T> void quantize_row(const T* row, long units, RowUnit* out) {
  for (long u = 0; u < units; u++) quantize_unit(load(row + u * UNIT), load(row + u * UNIT + 16), out[u]);
}

}  // namespace
