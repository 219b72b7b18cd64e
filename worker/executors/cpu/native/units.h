// Quantized weights and quantized inputs: the rule of their products, and how both lie in memory.
//
// A unit is 32 inputs. Of a row's unit x (as a linear takes it, denormals as zeros), with `largest` the largest |x|:
//   largest is NaN or infinite   scale = NaN, all q = 0
//   largest < 2^-100             scale = 0, all q = 0
//   else                         scale = RN(largest / 127), q = x times RN(127 / largest), rounded, to a whole number, to even
// `sum` is that of all q. An output's unit is codes u of 4 or 8 bits, a scale sw, and one of: the middle of the codes as its
// zero point z (8 or 128), a zero point z of its own, or a minimum mn (and z = 0). A slice of a sum starts at +0, and takes its
// units from the first to the last, in float32 by fused multiply-adds:
//   [ total = fma(mn, RN(scale * float(sum)), total) ]
//   total = fma(float(all u * q - z * sum), RN(sw * scale), total)
// What float() takes is a whole number below 2^24, which any order of adding gives: so any number of rows, threads and any
// instructions have the same bits. Slices are added as those of other products are (`linear.h`).
//
// Packed: panels of 32 outputs, one unit after the other: the codes of outputs 0 to 15 and of 16 to 31, 32 scales, and 32
// minima of the scales' type or 32 bytes of zero points. Codes of 16 outputs are lines of 64 bytes, [output][4 inputs]: line i
// has inputs 4i to 4i + 3; of 4 bits, these in the lower halves of its bytes and inputs 16 + 4i to 19 + 4i in the upper ones.
#pragma once
#include <math.h>

#include "decoder.h"
#include "rows.h"

namespace {

enum { UNIT = 32, UNIT_OUTPUTS = 32, CODE_LINE = 64 };

HF_INLINE int bytes_of_scale(int type) { return type == HF_FLOAT_SCALES ? 4 : 2; }

// How the units of a weight lie; without bits there are none, but tiles.
struct UnitForm {
  int bits, offset, scales;
  HF_INLINE_MEMBER bool is_there() const { return bits != 0; }
  HF_INLINE_MEMBER int code_bytes() const { return UNIT_OUTPUTS * UNIT * bits / 8; }
  HF_INLINE_MEMBER int scale_bytes() const { return UNIT_OUTPUTS * bytes_of_scale(scales); }
  HF_INLINE_MEMBER int offset_bytes() const {
    return offset == HF_MINIMA ? scale_bytes() : offset == HF_ZERO_POINTS ? UNIT_OUTPUTS : 0;
  }
  HF_INLINE_MEMBER int unit_bytes() const { return code_bytes() + scale_bytes() + offset_bytes(); }
};

// A unit of a row.
struct RowUnit {
  int8_t q[UNIT];
  float scale, scaled_sum;
  int32_t sum, middle_sum;  // the latter times the middle of a weight's codes
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

template <class T> HF_INLINE void quantize_unit(const T* x, int bits_of_codes, RowUnit& out) {
  const uint32_t INFINITE = 0x7f800000, TINY = 0x0d800000;  // 2^-100
  const Lanes a = load(x), b = load(x + 16);
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
  const __m256i sums = _mm256_madd_epi16(_mm256_add_epi16(words[0], words[1]), _mm256_set1_epi16(1));
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  _mm256_storeu_si256((__m256i*)out.q, q);
  out.sum = _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
  out.middle_sum = out.sum * (1 << (bits_of_codes - 1));
  out.scale = largest / 127.0f;
  out.scaled_sum = out.scale * (float)out.sum;
}

// out [units] = a row [units * 32] of a linear's inputs, for weights of so many bits.
template <class T> void quantize_row(const T* row, long units, int bits_of_codes, RowUnit* out) {
  for (long u = 0; u < units; u++) quantize_unit(row + u * UNIT, bits_of_codes, out[u]);
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

// Input k of output n of a packed unit.
inline float number_of_unit(const UnitForm& form, const uint8_t* unit, int k, int n) {
  const int line = form.bits == 4 ? k % 16 / 4 : k / 4;
  const uint8_t* codes = unit + n / 16 * (form.code_bytes() / 2);
  int code = codes[line * CODE_LINE + n % 16 * 4 + k % 4];
  if (form.bits == 4) code = k < 16 ? code & 15 : code >> 4;
  const uint8_t *scales = unit + form.code_bytes(), *offsets = scales + form.scale_bytes();
  const float scale = scale_number(scales + n * bytes_of_scale(form.scales), form.scales);
  if (form.offset == HF_MINIMA)
    return (float)code * scale + scale_number(offsets + n * bytes_of_scale(form.scales), form.scales);
  const int zero = form.offset == HF_ZERO_POINTS ? offsets[n] : 1 << (form.bits - 1);
  return (float)(code - zero) * scale;
}

}  // namespace
