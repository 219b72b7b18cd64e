// Quantized weights and quantized inputs: the rule of their products, and how both lie in memory.
//
// A unit is 32 inputs. Of a row's unit x (as a linear takes it, denormals as zeros), a line is 4 inputs, from a multiple of 4
// on. `largest` is the largest |x|, and `rest` the largest |x| of all lines but the first one that has the largest:
//   largest is NaN or infinite   scale = NaN, all q = 0
//   largest < 2^-100             scale = 0, all q = 0
//   else                         base = max(rest, largest / 128) if largest >= 2 * rest, else largest;
//                                scale = RN(base / 127), q = x times RN(127 / base), rounded, to a whole number, to even
// In the first case the line with the largest is far, and its q have 15 bits, all others 8: so one large input does not make
// the steps of the others large. `sum` is that of all q. An output's unit is codes u of 4,
// 5, 6 or 8 bits, a scale sw, and one of: the middle of the codes as its zero point z (2^(bits - 1)), a zero point z of its
// own, or a minimum mn (and z = 0). A slice of a sum starts at +0, and takes its units from the first to the last, in float32
// by fused multiply-adds:
//   [ total = fma(mn, RN(scale * RN(sum)), total) ]
//   total = fma(RN(all u * q - z * sum), RN(sw * scale), total)
// What is rounded to float32 is a whole number below 2^31, which any order of adding gives: so any number of rows, threads and
// any instructions have the same bits. Slices are added as those of other products are (`linear.h`).
//
// Eight units may have one factor d in float16 together, and one dmin: then sw = d * a byte and mn = -(dmin * a byte), both
// exact in float32. Or their halves of 16 inputs have signed bytes a and b, and z is the middle: then sw = d, and what is
// rounded is a * (the first half's u * q - z * sum) + b * (the second's).
//
// Packed: panels of 32 outputs, one unit after the other: the codes of outputs 0 to 15 and of 16 to 31, 32 scales, and 32
// minima of the scales' type or 32 bytes of zero points. Codes of 16 outputs are lines of 64 bytes, [output][4 inputs]: line i
// has inputs 4i to 4i + 3; of fewer bits than 8, their lower four in the lower halves of its bytes, and those of inputs 16 + 4i
// to 19 + 4i in the upper ones. The fifth bits, or the fifth and sixth ones, are one or two more lines: see `UnitCodes`.
// With common factors the scales are 32 bytes and the minima or second scales 32 more; behind all units of a panel lie, for
// eight units at a time as they are counted in the whole weight, 32 factors and 32 of the minima.
#pragma once
#include <math.h>

#include "decoder.h"
#include "rows.h"

namespace {

enum { UNIT = 32, UNIT_OUTPUTS = 32, CODE_LINE = 64, UNITS_TOGETHER = 8 };
enum { LINE_INPUTS = 4, FAR_BITS = 7, FAR = 1 << FAR_BITS, FAR_FROM = 2 };  // of a row's unit

NATIVE_INLINE int bytes_of_scale(int type) { return type == NATIVE_FLOAT_SCALES ? 4 : 2; }

// How the units of a weight lie; without bits there are none, but tiles.
struct UnitForm {
  int bits, offset, scales;
  int before;  // units of the whole weight before the first one, modulo UNITS_TOGETHER
  NATIVE_INLINE_MEMBER bool is_there() const { return bits != 0; }
  NATIVE_INLINE_MEMBER bool has_factors() const { return offset == NATIVE_BYTE_MINIMA || offset == NATIVE_BYTE_HALVES; }
  NATIVE_INLINE_MEMBER int code_bytes() const { return UNIT_OUTPUTS * UNIT * bits / 8; }
  NATIVE_INLINE_MEMBER int scale_bytes() const { return UNIT_OUTPUTS * (has_factors() ? 1 : bytes_of_scale(scales)); }
  NATIVE_INLINE_MEMBER int offset_bytes() const {
    return offset == NATIVE_MINIMA ? scale_bytes() : offset == NATIVE_MIDDLE ? 0 : UNIT_OUTPUTS;
  }
  NATIVE_INLINE_MEMBER int unit_bytes() const { return code_bytes() + scale_bytes() + offset_bytes(); }
  // Of eight units' common factors.
  NATIVE_INLINE_MEMBER int factor_bytes() const {
    return offset == NATIVE_BYTE_MINIMA ? 4 * UNIT_OUTPUTS : offset == NATIVE_BYTE_HALVES ? 2 * UNIT_OUTPUTS : 0;
  }
};
NATIVE_INLINE UnitForm form_of(const NativeUnits& units) {
  return {units.bits, units.offset, units.scales, units.before};
}

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
  const __m256i q =
      _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[0], words[1]), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256((__m256i*)out.q, q);
#ifndef NATIVE_VNNI
  store_words(words[0], out.words), store_words(words[1], out.words + UNIT / 2);
#endif
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
  memset(out.far, 0, sizeof out.far);
  out.has_far = out.line = 0;
  out.scale = _mm_cvtss_f32(_mm_shuffle_ps(scales, scales, 1));
  out.scaled_sum = out.scale * (float)sum;
  out.parted_sum = sum & 0xffff;
  out.sum_8 = sum * 8, out.first_sum_8 = first * 8, out.sum_128 = sum * 128;
#ifndef NATIVE_VNNI
  store_words_of_bytes(p, out.words), store_words_of_bytes(q, out.words + UNIT / 2);
#endif
  return true;
}
NATIVE_INLINE void quantize_unit(Lanes a, Lanes b, RowUnit& out) {
  if (!quantize_plain_unit(a, b, out)) quantize_any_unit(a, b, out);
}
#else
NATIVE_INLINE void quantize_unit(Lanes a, Lanes b, RowUnit& out) { quantize_any_unit(a, b, out); }
#endif

// out [units] = a row [units * 32] of a linear's inputs.
template <class T> void quantize_row(const T* row, long units, RowUnit* out) {
  for (long u = 0; u < units; u++) quantize_unit(load(row + u * UNIT), load(row + u * UNIT + 16), out[u]);
}

NATIVE_INLINE float scale_number(const uint8_t* p, int type) {
  if (type == NATIVE_FLOAT_SCALES) {
    float number;
    memcpy(&number, p, 4);
    return number;
  }
  uint16_t bits;
  memcpy(&bits, p, 2);
  return type == NATIVE_HALF_SCALES ? element(Half{bits}) : element(Bf16{bits});
}

// Some units of a panel.
struct UnitPanel {
  const uint8_t* first;
  int count;
  UnitForm form;
  int ahead;               // bytes by which they are fetched, or 0
  const uint8_t* factors;  // of all units of the panel, if they have common ones
  int place;               // of the first unit, from that of the panel's first factors on
  NATIVE_INLINE_MEMBER const uint8_t* factors_of(int unit) const {
    return factors + (place + unit) / UNITS_TOGETHER * form.factor_bytes();
  }
};

// The code of input k of output n of a packed unit.
inline int code_of_unit(const UnitForm& form, const uint8_t* unit, int k, int n) {
  const uint8_t* codes = unit + n / 16 * (form.code_bytes() / 2) + n % 16 * 4 + k % 4;
  if (form.bits == 8) return codes[k / 4 * CODE_LINE];
  const int line = k % 16 / 4, both = codes[line * CODE_LINE], code = k < 16 ? both & 15 : both >> 4;
  if (form.bits == 4) return code;
  const int place = 2 * line + k / 16, per_half = form.bits == 5 ? 4 : 2, more = form.bits - 4;  // see `UnitCodes`
  const int plane = codes[(4 + place / (2 * per_half)) * CODE_LINE], at = place % (2 * per_half);
  const int shift = at < per_half ? 4 + at * more : (at - per_half) * more;
  return code | (plane >> shift & ((1 << more) - 1)) << 4;
}

// Input k of output n of unit `u` of a panel.
inline float number_of_unit(const UnitPanel& panel, int u, int k, int n) {
  const UnitForm& form = panel.form;
  const uint8_t* unit = panel.first + (long)u * form.unit_bytes();
  const uint8_t *scales = unit + form.code_bytes(), *offsets = scales + form.scale_bytes();
  const int code = code_of_unit(form, unit, k, n), middle = 1 << (form.bits - 1);
  if (form.has_factors()) {
    const uint8_t* factors = panel.factors_of(u);
    const float factor = scale_number(factors + 2 * n, NATIVE_HALF_SCALES);
    if (form.offset == NATIVE_BYTE_HALVES)
      return (float)(code - middle) * ((float)(int8_t)(k < 16 ? scales : offsets)[n] * factor);
    const float minimum = scale_number(factors + 2 * UNIT_OUTPUTS + 2 * n, NATIVE_HALF_SCALES) * (float)offsets[n];
    return (float)code * (factor * (float)scales[n]) - minimum;
  }
  const float scale = scale_number(scales + n * bytes_of_scale(form.scales), form.scales);
  if (form.offset == NATIVE_MINIMA)
    return (float)code * scale + scale_number(offsets + n * bytes_of_scale(form.scales), form.scales);
  return (float)(code - (form.offset == NATIVE_ZERO_POINTS ? offsets[n] : middle)) * scale;
}

}  // namespace
