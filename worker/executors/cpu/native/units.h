// Quantized weights and quantized inputs: the rule of their products, and how both lie in memory.
//
// A unit is 32 inputs. Of a row's unit x (as a linear takes it, denormals as zeros), with `largest` the largest |x|:
//   largest is NaN or infinite   scale = NaN, all q = 0
//   largest < 2^-100             scale = 0, all q = 0
//   else                         scale = RN(largest / 127), q = x times RN(127 / largest), rounded, to a whole number, to even
// `sum` is that of all q. An output's unit is codes u of 4, 5, 6 or 8 bits, a scale sw, and one of: the middle of the codes as
// its zero point z (2^(bits - 1)), a zero point z of its own, or a minimum mn (and z = 0). A slice of a sum starts at +0, and
// takes its units from the first to the last, in float32 by fused multiply-adds:
//   [ total = fma(mn, RN(scale * float(sum)), total) ]
//   total = fma(float(all u * q - z * sum), RN(sw * scale), total)
// What float() takes is a whole number below 2^24, which any order of adding gives: so any number of rows, threads and any
// instructions have the same bits. Slices are added as those of other products are (`linear.h`).
//
// Eight units may have one factor d in float16 together, and one dmin: then sw = d * a byte and mn = -(dmin * a byte), both
// exact in float32. Or their halves of 16 inputs have signed bytes a and b, and z is the middle: then sw = d, and float()
// takes a * (the first half's u * q - z * sum) + b * (the second's).
//
// Inputs of the head are quantized twice: again, by the same rule, what the first time left, RN(x - scale * q), and the two
// products of a slice are added, the first one first.
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

HF_INLINE int bytes_of_scale(int type) { return type == HF_FLOAT_SCALES ? 4 : 2; }

// How the units of a weight lie; without bits there are none, but tiles.
struct UnitForm {
  int bits, offset, scales;
  int before;  // units of the whole weight before the first one, modulo UNITS_TOGETHER
  int passes;  // how often inputs are quantized
  HF_INLINE_MEMBER bool is_there() const { return bits != 0; }
  HF_INLINE_MEMBER bool has_factors() const { return offset == HF_BYTE_MINIMA || offset == HF_BYTE_HALVES; }
  HF_INLINE_MEMBER int code_bytes() const { return UNIT_OUTPUTS * UNIT * bits / 8; }
  HF_INLINE_MEMBER int scale_bytes() const { return UNIT_OUTPUTS * (has_factors() ? 1 : bytes_of_scale(scales)); }
  HF_INLINE_MEMBER int offset_bytes() const {
    return offset == HF_MINIMA ? scale_bytes() : offset == HF_MIDDLE ? 0 : UNIT_OUTPUTS;
  }
  HF_INLINE_MEMBER int unit_bytes() const { return code_bytes() + scale_bytes() + offset_bytes(); }
  // Of eight units' common factors.
  HF_INLINE_MEMBER int factor_bytes() const {
    return offset == HF_BYTE_MINIMA ? 4 * UNIT_OUTPUTS : offset == HF_BYTE_HALVES ? 2 * UNIT_OUTPUTS : 0;
  }
};

// A unit of a row.
struct RowUnit {
  int8_t q[UNIT];
  float scale, scaled_sum;
  int32_t sum, middle_sum, first_middle_sum;  // the latter two times the middle of a weight's codes; of the first half
};

HF_INLINE __m256i magnitudes(__m256 v) {
  return _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff));
}
HF_INLINE uint32_t largest_magnitude(Lanes a, Lanes b) {  // as bits, in whose order NaN comes last
  __m256i most = _mm256_max_epi32(magnitudes(low_half(a)), magnitudes(high_half(a)));
  most = _mm256_max_epi32(most, _mm256_max_epi32(magnitudes(low_half(b)), magnitudes(high_half(b))));
  __m128i q = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return (uint32_t)_mm_cvtsi128_si32(_mm_max_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}

// Eight numbers as whole ones, rounded to even.
HF_INLINE __m256i whole(__m256 v, __m256 factor) { return _mm256_cvtps_epi32(_mm256_mul_ps(v, factor)); }

HF_INLINE int32_t sum_of_words(__m256i words) {
  const __m256i sums = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

// Of inputs 0 to 15 and 16 to 31.
HF_INLINE void quantize_unit(Lanes a, Lanes b, int bits_of_codes, RowUnit& out) {
  const uint32_t INFINITE = 0x7f800000, TINY = 0x0d800000;  // 2^-100
  const uint32_t bits = largest_magnitude(a, b);
  if (__builtin_expect(bits >= INFINITE || bits < TINY, 0)) {
    memset(&out, 0, sizeof out);
    if (bits >= INFINITE) out.scale = out.scaled_sum = NAN;
    return;
  }
  float largest;
  memcpy(&largest, &bits, 4);
  const __m256 factor = _mm256_set1_ps(127.0f / largest);
  const __m256i v[4] = {whole(low_half(a), factor), whole(high_half(a), factor), whole(low_half(b), factor),
                        whole(high_half(b), factor)};
  const __m256i words[2] = {_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3])};
  const __m256i q = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[0], words[1]),
                                                _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256((__m256i*)out.q, q);
  const int32_t first = sum_of_words(words[0]), middle = 1 << (bits_of_codes - 1);
  out.sum = first + sum_of_words(words[1]);
  out.middle_sum = out.sum * middle, out.first_middle_sum = first * middle;
  out.scale = largest / 127.0f;
  out.scaled_sum = out.scale * (float)out.sum;
}

HF_INLINE Lanes numbers_of(const int8_t* q) {
  alignas(64) float numbers[16];
  for (int i = 0; i < 16; i++) numbers[i] = q[i];
  return load(numbers);
}

// out [units] = a row [units * 32] of a linear's inputs, for weights of so many bits; `left`, unless null: what of them is not
// in `out`, likewise.
template <class T> void quantize_row(const T* row, long units, int bits_of_codes, RowUnit* out, RowUnit* left) {
  for (long u = 0; u < units; u++) {
    const Lanes a = load(row + u * UNIT), b = load(row + u * UNIT + 16);
    quantize_unit(a, b, bits_of_codes, out[u]);
    if (!left) continue;
    const Lanes scale = all(out[u].scale);
    quantize_unit(minus_fma(scale, numbers_of(out[u].q), a), minus_fma(scale, numbers_of(out[u].q + 16), b), bits_of_codes,
                  left[u]);
  }
}

HF_INLINE float scale_number(const uint8_t* p, int type) {
  if (type == HF_FLOAT_SCALES) {
    float number;
    memcpy(&number, p, 4);
    return number;
  }
  uint16_t bits;
  memcpy(&bits, p, 2);
  return type == HF_HALF_SCALES ? element(Half{bits}) : element(Bf16{bits});
}

// Some units of a panel.
struct UnitPanel {
  const uint8_t* first;
  int count;
  UnitForm form;
  int ahead;               // bytes by which they are fetched, or 0
  const uint8_t* factors;  // of all units of the panel, if they have common ones
  int place;               // of the first unit, from that of the panel's first factors on
  HF_INLINE_MEMBER const uint8_t* factors_of(int unit) const {
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
    const float factor = scale_number(factors + 2 * n, HF_HALF_SCALES);
    if (form.offset == HF_BYTE_HALVES) return (float)(code - middle) * ((float)(int8_t)(k < 16 ? scales : offsets)[n] * factor);
    const float minimum = scale_number(factors + 2 * UNIT_OUTPUTS + 2 * n, HF_HALF_SCALES) * (float)offsets[n];
    return (float)code * (factor * (float)scales[n]) - minimum;
  }
  const float scale = scale_number(scales + n * bytes_of_scale(form.scales), form.scales);
  if (form.offset == HF_MINIMA)
    return (float)code * scale + scale_number(offsets + n * bytes_of_scale(form.scales), form.scales);
  return (float)(code - (form.offset == HF_ZERO_POINTS ? offsets[n] : middle)) * scale;
}

}  // namespace
