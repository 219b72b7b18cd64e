// Products of rows in units with weights in units: for any number of rows, by the rule of `units.h`.
//
// Codes go from memory or a cache to registers for each block of rows anew; without VNNI those of more than a few rows are
// unpacked once (`unit_pieces.h`).
#pragma once
#include "unit_pieces.h"

namespace {

enum { MANY_FAR = 4 };  // of 64 units
// From how many on rows fetch what comes next, all along their products; fewer fetch ahead of their use.
enum { COMING_ROWS = IN_WHOLE_BYTES ? UNIT_ROWS : 2 };
// By how many bytes: of 8 bits, which VNNI takes whole, more is slower where the memory is.
NATIVE_INLINE int units_ahead(const UnitForm& form) { return !IN_WHOLE_BYTES ? 8192 : form.bits == 8 ? 3072 : 6144; }

template <int BITS, int OFFSET, bool HAS_FAR>
NATIVE_INLINE Wide joined(Wide total, const UnitSum<BITS>& sum, const UnitCodes<BITS>& codes,
                          const UnitFactors<OFFSET>& w, const RowUnit& x) {
  Whole products;
  const Whole far_codes = codes.far(x.line);
  if constexpr (OFFSET == NATIVE_BYTE_HALVES) {
    const Whole far = HAS_FAR ? add_far<BITS>(whole_zero(), far_codes, x.far) : whole_zero();
    const Whole is_first = whole_all(x.line < 4 ? -1 : 0);
    const Whole far_of_first = whole_and(far, is_first), far_of_second = whole_minus(far, far_of_first);
    const Whole first = whole_minus(whole_plus(sum.first(), far_of_first), middles<BITS>(x.first_sum_8));
    const Whole second = whole_minus(whole_plus(sum.second(), far_of_second), middles<BITS>(x.sum_8 - x.first_sum_8));
    products = whole_plus(whole_times(first, w.zero), whole_times(second, w.second));
  } else products = HAS_FAR ? add_far<BITS>(sum.total(), far_codes, x.far) : sum.total();
  return with_unit(total, without_zero<BITS>(products, w, x), w, x);
}

// Of all rows and registers of a block, which takes unit `u` of the panel; `scales` are what lies behind its codes.
template <int BITS, int OFFSET, bool HAS_FAR, int R, int C>
NATIVE_INLINE void join_all(Wide (&total)[R][C], const UnitSum<BITS> (&sums)[R][C], const UnitCodes<BITS> (&codes)[C],
                            const UnitPanel& panel, int u, const uint8_t* scales, int output, const RowUnit* rows,
                            long stride) {
#pragma GCC unroll 4
  for (int c = 0; c < C; c++) {
    const UnitFactors<OFFSET> factors(scales, panel.factors_of(u), panel.form, output + c * WIDTH);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      total[r][c] = joined<BITS, OFFSET, HAS_FAR>(total[r][c], sums[r][c], codes[c], factors, rows[r * stride]);
  }
}

// Whether more than a few units of some rows have a far line: then all are taken as if they had, which costs less than
// branches that cannot be foreseen. Of 64 units, or fewer.
NATIVE_INLINE bool have_many_far(const RowUnit* rows, long stride, int count, int units) {
  int far = 0;
  for (int r = 0; r < 8; r++)
    for (int u = 0; u < std::min(units, 8); u++) far += rows[u + r * count / 8 * stride].has_far;
  return far >= MANY_FAR;
}

// out [R][C registers, from `output` on] = rows [R] times the units of a panel.
template <int BITS, int OFFSET, int R, int C, bool ALL_FAR = false>
__attribute__((noinline)) void unit_block(const RowUnit* rows, long stride, const UnitPanel& panel, int output,
                                          float* out, long out_stride, Coming* coming = nullptr) {
  const int lines = BITS == 8 ? 8 : 4, half_bytes = BITS * CODE_LINE, step = panel.form.unit_bytes();
  const int parts = BITS == 8 && IN_WHOLE_BYTES ? 1 : 2;  // of a line of codes
  const int turns = R > 1 ? parts : 1;  // many rows take them in turn: fewer broadcasts wait in registers
  const UnitForm form = panel.form;
  const int ahead = panel.ahead;
  const uint8_t* unit = panel.first;
  Wide total[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) total[r][c] = wide_zero();
  for (int u = 0; u < panel.count; u++, unit += step, rows++) {
    UnitSum<BITS> sums[R][C];
    UnitCodes<BITS> codes[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++)
      codes[c] = UnitCodes<BITS>(unit + (output + c * WIDTH) / 16 * half_bytes + (output + c * WIDTH) % 16 * 4);
#pragma GCC unroll 4
    for (int c = 0; c < C; c++)
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
        if constexpr (ALL_FAR) sums[r][c].begin_far(codes[c], rows[r * stride]);
        else sums[r][c].begin();
    if (coming) coming->some();
#pragma GCC unroll 8
    for (int i = 0; i < lines; i++)
#pragma GCC unroll 2
      for (int part = 0; part < turns; part++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
          if (c * WIDTH % 16 == 0 && part == 0 && ahead)
            _mm_prefetch((const char*)codes[c].first + i * CODE_LINE + ahead, _MM_HINT_T0);
          const CodeLine<BITS> line = codes[c].line(i);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int upper = part; upper < parts; upper += turns)
              sums[r][c].add(i, upper, upper ? line.high : line.low, rows[r * stride]);
        }
    const uint8_t* scales = unit + 2 * half_bytes;
    if (ahead && BITS > 4 && BITS < 8)
      for (int at = 4 * CODE_LINE; at < half_bytes; at += CODE_LINE) {
        _mm_prefetch((const char*)unit + ahead + at, _MM_HINT_T0);
        _mm_prefetch((const char*)unit + ahead + half_bytes + at, _MM_HINT_T0);
      }
    if (ahead)
      for (int at = 0; at < step - 2 * half_bytes; at += 64)
        _mm_prefetch((const char*)scales + ahead + at, _MM_HINT_T0);
    bool far = false;
#pragma GCC unroll 8
    for (int r = 0; r < R && lacks_far<BITS> && !ALL_FAR; r++) far |= rows[r * stride].has_far;
    if (far) join_all<BITS, OFFSET, lacks_far<BITS>>(total, sums, codes, panel, u, scales, output, rows, stride);
    else join_all<BITS, OFFSET, false>(total, sums, codes, panel, u, scales, output, rows, stride);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) wide_store(out + r * out_stride + c * WIDTH, total[r][c]);
}

// Of as many rows as there are.
template <int BITS, int OFFSET, int R, int C, bool ALL_FAR = false>
int unit_blocks(int row, int count, const RowUnit* rows, long stride, UnitPanel& panel, int output, float* out,
                long out_stride, Coming* coming) {
  for (; count - row >= R; row += R, panel.ahead = 0)
    unit_block<BITS, OFFSET, R, C, ALL_FAR>(rows + row * stride, stride, panel, output, out + row * out_stride,
                                            out_stride, coming);
  return row;
}

template <int BITS, int OFFSET>
void unit_rows(const RowUnit* rows, long stride, int count, UnitPanel panel, float* out, long out_stride) {
  if (count == 1) return unit_block<BITS, OFFSET, 1, UNIT_REGISTERS>(rows, stride, panel, 0, out, out_stride);
#ifndef NATIVE_VNNI
  if (count >= piece_rows_of<BITS>) return piece_rows<BITS, OFFSET>(rows, stride, count, panel, out, out_stride);
#endif
  Coming coming(panel, passes_of(count));
  Coming* fetched = count >= COMING_ROWS ? &coming : nullptr;
  const int ahead = fetched ? 0 : panel.ahead;
  const bool all_far = begins_far<BITS> && count >= UNIT_ROWS && have_many_far(rows, stride, count, panel.count);
  for (int output = 0; output < UNIT_OUTPUTS; output += UNIT_COLUMNS * WIDTH) {
    float* to = out + output;
    panel.ahead = ahead;  // the first rows fetch what all of them take
    auto* blocks = all_far ? unit_blocks<BITS, OFFSET, UNIT_ROWS, UNIT_COLUMNS, begins_far<BITS>>
                           : unit_blocks<BITS, OFFSET, UNIT_ROWS, UNIT_COLUMNS, false>;
    int row = blocks(0, count, rows, stride, panel, output, to, out_stride, fetched);
    row = unit_blocks<BITS, OFFSET, 3, UNIT_COLUMNS>(row, count, rows, stride, panel, output, to, out_stride, fetched);
    row = unit_blocks<BITS, OFFSET, 2, UNIT_COLUMNS>(row, count, rows, stride, panel, output, to, out_stride, fetched);
    unit_blocks<BITS, OFFSET, 1, UNIT_COLUMNS>(row, count, rows, stride, panel, output, to, out_stride, fetched);
  }
}

// out [count][32] = rows [count], whose units are `stride` apart, times the units of a panel.
inline void unit_products(const RowUnit* rows, long stride, int count, const UnitPanel& panel, float* out,
                          long out_stride) {
  typedef void Product(const RowUnit*, long, int, UnitPanel, float*, long);
  static Product* const products[4][5] = {
      {unit_rows<4, NATIVE_MIDDLE>, unit_rows<4, NATIVE_ZERO_POINTS>, unit_rows<4, NATIVE_MINIMA>,
       unit_rows<4, NATIVE_BYTE_MINIMA>, nullptr},
      {unit_rows<5, NATIVE_MIDDLE>, nullptr, unit_rows<5, NATIVE_MINIMA>, unit_rows<5, NATIVE_BYTE_MINIMA>, nullptr},
      {nullptr, nullptr, nullptr, nullptr, unit_rows<6, NATIVE_BYTE_HALVES>},
      {unit_rows<8, NATIVE_MIDDLE>, unit_rows<8, NATIVE_ZERO_POINTS>, nullptr, nullptr, nullptr}};
  const UnitForm& form = panel.form;
  products[form.bits == 8 ? 3 : form.bits - 4][form.offset](rows, stride, count, panel, out, out_stride);
}

}  // namespace
