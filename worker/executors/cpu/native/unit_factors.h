// What an output's unit has beside its codes, in registers of outputs; and how a unit's whole sums join those before.
#pragma once
#include "unit_sums.h"

namespace {

enum {
  UNIT_REGISTERS = UNIT_OUTPUTS / WIDTH,
  UNIT_COLUMNS = 2,
  UNIT_ROWS = 4
};  // of a block of many rows: registers, rows

// How often blocks of so many rows pass a panel.
NATIVE_INLINE int passes_of(int count) {
  return UNIT_OUTPUTS / (UNIT_COLUMNS * WIDTH) * ((count + UNIT_ROWS - 1) / UNIT_ROWS);
}

NATIVE_INLINE Wide wide_scales(const uint8_t* p, int type, int output) {
  if (type == NATIVE_HALF_SCALES) return wide_halves(p + 2 * output);
  return type == NATIVE_BFLOAT_SCALES ? wide_bfloats(p + 2 * output) : wide_load((const float*)p + output);
}

// Zero points, and FAR times these in the upper words: for sums in two parts.
NATIVE_INLINE Whole times_parted(Whole zero) { return whole_or(zero, whole_left<16 + FAR_BITS>(zero)); }

// What an output's unit has beside its codes, for a register of outputs.
template <int OFFSET> struct UnitFactors {
  Wide scale, minimum;
  Whole zero, second;  // zero points; bytes of the halves
  NATIVE_INLINE_MEMBER UnitFactors(const uint8_t* scales, const uint8_t* common, const UnitForm& form, int output)
      : scale(), minimum(), zero(), second() {
    const uint8_t* offsets = scales + form.scale_bytes();
    if (OFFSET == NATIVE_BYTE_MINIMA) {
      scale = wide_times(wide_halves(common + 2 * output), wide_of(widened_bytes(scales + output)));
      minimum = wide_times(wide_halves(common + 2 * (UNIT_OUTPUTS + output)), wide_of(widened_bytes(offsets + output)));
      minimum = wide_minus(minimum);
      return;
    }
    if (OFFSET == NATIVE_BYTE_HALVES) {
      scale = wide_halves(common + 2 * output);
      zero = widened_signs(scales + output), second = widened_signs(offsets + output);
      return;
    }
    scale = wide_scales(scales, form.scales, output);
    if (OFFSET == NATIVE_MINIMA) minimum = wide_scales(offsets, form.scales, output);
    if (OFFSET == NATIVE_ZERO_POINTS) zero = times_parted(widened_bytes(offsets + output));
  }
};

// The middle of codes of so many bits times a sum, of which eight times are given.
template <int BITS> NATIVE_INLINE Whole middles(int32_t sum_8) {
  return BITS == 4 ? whole_all(sum_8) : whole_left<BITS - 4>(whole_all(sum_8));
}

// A unit's whole numbers, less their zero points.
template <int BITS, int OFFSET>
NATIVE_INLINE Whole without_zero(Whole products, const UnitFactors<OFFSET>& w, const RowUnit& x) {
  if (OFFSET == NATIVE_MIDDLE) return whole_minus(products, BITS == 8 ? whole_all(x.sum_128) : middles<BITS>(x.sum_8));
  if (OFFSET == NATIVE_ZERO_POINTS) return whole_minus(products, pair_products(w.zero, whole_all(x.parted_sum)));
  return products;
}

// Those of the units before and of one more.
template <int OFFSET>
NATIVE_INLINE Wide with_unit(Wide total, Whole products, const UnitFactors<OFFSET>& w, const RowUnit& x) {
  if (OFFSET == NATIVE_MINIMA || OFFSET == NATIVE_BYTE_MINIMA)
    total = wide_fma(w.minimum, wide_all(&x.scaled_sum), total);
  return wide_fma(wide_of(products), wide_times(w.scale, wide_all(&x.scale)), total);
}

}  // namespace
