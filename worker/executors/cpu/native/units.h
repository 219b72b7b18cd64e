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
#include "decoder.h"
#include "rows.h"

namespace {

enum { UNIT = 32, UNIT_OUTPUTS = 32, CODE_LINE = 64, UNITS_TOGETHER = 8 };

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
  const uint8_t* next;     // units that are multiplied then, and their bytes; or null
  long next_bytes;
  NATIVE_INLINE_MEMBER const uint8_t* factors_of(int unit) const {
    return factors + (place + unit) / UNITS_TOGETHER * form.factor_bytes();
  }
};

// What is multiplied next: some lines of it are fetched into the second cache with each unit that rows take.
struct Coming {
  const uint8_t *at, *end;
  long lines;
  // While the rows pass a panel so many times.
  NATIVE_INLINE_MEMBER Coming(const UnitPanel& panel, long passes)
      : at(panel.next), end(panel.next + panel.next_bytes), lines(panel.next_bytes / 64 / (passes * panel.count) + 1) {}
  NATIVE_INLINE_MEMBER void some() {
    for (long i = 0; i < lines && at < end; i++, at += 64) _mm_prefetch((const char*)at, _MM_HINT_T1);
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
