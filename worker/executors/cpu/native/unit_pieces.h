// Products of many rows in units without VNNI: a piece of a panel's codes is unpacked once for all of them.
//
// A piece is some units of two registers of outputs. Codes of 4 and 5 bits lie in it as bytes, for VPMADDUBSW; those of 6 and 8
// bits as words less their zero points, of 6 bits times the bytes of their halves too, for VPMADDWD. A block of rows takes the
// whole sums of all units first, then what far lines add, from a list of them: branches that cannot be foreseen would cost more.
// Then the sums join, unit after unit, while totals stay in registers.
#pragma once
#include "unit_factors.h"

#ifndef NATIVE_VNNI
namespace {

template <int BITS> constexpr int piece_rows_of = BITS == 8 ? 16 : 6;  // from so many rows on

template <int BITS> constexpr bool in_words = BITS > 5;

template <int BITS, int OFFSET> constexpr bool takes_middle = !in_words<BITS> && OFFSET == NATIVE_MIDDLE;

template <int BITS> struct Piece {
  enum { LINES = in_words<BITS> ? 16 : 8, UNITS = 256 / LINES };
  Whole codes[UNITS][LINES][UNIT_COLUMNS];
};

// Where a piece is: units [begin, begin + count) of a panel, two registers of outputs from `output` on.
struct PiecePlace {
  const UnitPanel& panel;
  const int begin, count, output, step, code_bytes;
  const uint8_t* const first;
  NATIVE_INLINE_MEMBER PiecePlace(const UnitPanel& panel, int begin, int most, int output)
      : panel(panel),
        begin(begin),
        count(std::min(most, panel.count - begin)),
        output(output),
        step(panel.form.unit_bytes()),
        code_bytes(panel.form.code_bytes()),
        first(panel.first + (long)begin * step) {}
  template <int BITS> NATIVE_INLINE_MEMBER UnitCodes<BITS> codes(int unit, int c) const {
    const int from = output + c * WIDTH;
    return UnitCodes<BITS>(first + (long)unit * step + from / 16 * (BITS * CODE_LINE) + from % 16 * 4);
  }
  template <int OFFSET> NATIVE_INLINE_MEMBER UnitFactors<OFFSET> factors(int unit, int c) const {
    const uint8_t* scales = first + (long)unit * step + code_bytes;
    return UnitFactors<OFFSET>(scales, panel.factors_of(begin + unit), panel.form, output + c * WIDTH);
  }
};

// A line's even and odd codes, less their zero points.
template <int BITS, int OFFSET>
NATIVE_INLINE void unpack_words(Whole (*to)[UNIT_COLUMNS], const CodeLine<BITS>& line, const UnitFactors<OFFSET>& w,
                                int i, int c) {
  if constexpr (BITS == 6) {
    const Whole middle = words_all(32), halves[2] = {line.low, line.high},
                factors[2] = {both_words(w.zero), both_words(w.second)};
    for (int half = 0; half < 2; half++) {
      to[8 * half + 2 * i][c] = words_times(words_minus(even_bytes(halves[half]), middle), factors[half]);
      to[8 * half + 2 * i + 1][c] = words_times(words_minus(odd_bytes(halves[half]), middle), factors[half]);
    }
  } else {
    const Whole zero = OFFSET == NATIVE_MIDDLE ? words_all(128) : both_words(w.zero);
    to[2 * i][c] = words_minus(line.low, zero), to[2 * i + 1][c] = words_minus(line.high, zero);
  }
}

template <int BITS, int OFFSET> void unpack(const PiecePlace& at, Piece<BITS>& piece) {
  for (int u = 0; u < at.count; u++) {
    for (int c = 0; c < UNIT_COLUMNS; c++) {
      const UnitCodes<BITS> codes = at.codes<BITS>(u, c);
      const UnitFactors<OFFSET> w = at.factors<OFFSET>(u, c);
#pragma GCC unroll 8
      for (int i = 0; i < (BITS == 8 ? 8 : 4); i++) {
        const CodeLine<BITS> line = codes.line(i);
        if constexpr (in_words<BITS>) unpack_words<BITS, OFFSET>(piece.codes[u], line, w, i, c);
        else piece.codes[u][i][c] = line.low, piece.codes[u][4 + i][c] = line.high;
      }
    }
  }
}

// Whole sums of a unit for R rows, without what far lines add to bytes.
template <int BITS, int OFFSET, int R>
NATIVE_INLINE void sum_unit(const Whole (*codes)[UNIT_COLUMNS], const RowUnit* x, long stride,
                            Whole (*out)[UNIT_COLUMNS]) {
  const int lines = Piece<BITS>::LINES;
  Whole sum[R][UNIT_COLUMNS];
#pragma GCC unroll 16
  for (int i = 0; i < lines; i++) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const Whole q = in_words<BITS> ? four_bytes(x[r * stride].words + 2 * i) : four_bytes(x[r * stride].q + 4 * i);
#pragma GCC unroll 2
      for (int c = 0; c < UNIT_COLUMNS; c++) {
        if (in_words<BITS>) add_or_begin_words(i, sum[r][c], codes[i][c], q);
        else add_or_begin(BITS == 4 ? i : i % 4, sum[r][c], codes[i][c], q);
        if (BITS == 5 && i == 3) out[r][c] = sum_of_pairs(sum[r][c]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int c = 0; c < UNIT_COLUMNS; c++) {
      Whole whole = in_words<BITS> ? sum[r][c] : sum_of_pairs(sum[r][c]);
      if (BITS == 5) whole = whole_plus(out[r][c], whole);
      out[r][c] = takes_middle<BITS, OFFSET> ? whole_minus(whole, middles<BITS>(x[r * stride].sum_8)) : whole;
    }
}

// The whole sums of a piece's units for R rows, from `x` on.
template <int BITS, int OFFSET, int R> struct PieceSums {
  Whole sums[Piece<BITS>::UNITS][R][UNIT_COLUMNS];
  NATIVE_INLINE_MEMBER void fill(const Piece<BITS>& piece, int count, const RowUnit* x, long stride, Coming& coming) {
    uint16_t far[Piece<BITS>::UNITS * R + 1];  // the last one is written and not kept
    int num_far = 0;
    for (int u = 0; u < count; u++) {
      coming.some();
      sum_unit<BITS, OFFSET, R>(piece.codes[u], x + u, stride, sums[u]);
#pragma GCC unroll 4
      for (int r = 0; r < R && !in_words<BITS>; r++)
        far[num_far] = (uint16_t)(u * R + r), num_far += x[u + r * stride].has_far;
    }
    if constexpr (!in_words<BITS>)
      for (int i = 0; i < num_far; i++) {
        const int u = far[i] / R, r = far[i] % R;
        const RowUnit& unit = x[u + r * stride];
        for (int c = 0; c < UNIT_COLUMNS; c++)
          sums[u][r][c] = add_far<BITS>(sums[u][r][c], piece.codes[u][unit.line][c], unit.far);
      }
  }
};

// out [R][two registers] += rows [R] times a piece; or =, of a panel's first one.
template <int BITS, int OFFSET, int R>
__attribute__((noinline)) void piece_block(const PiecePlace& at, const Piece<BITS>& piece, const RowUnit* x,
                                           long stride, float* out, long out_stride, Coming& coming) {
  const bool has_own_zero = !in_words<BITS> && OFFSET == NATIVE_ZERO_POINTS;
  PieceSums<BITS, OFFSET, R> block;
  block.fill(piece, at.count, x, stride, coming);
  Wide total[R][UNIT_COLUMNS];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int c = 0; c < UNIT_COLUMNS; c++)
      total[r][c] = at.begin ? wide_load(out + r * out_stride + c * WIDTH) : wide_zero();
  for (int u = 0; u < at.count; u++, x++) {
    const UnitFactors<OFFSET> w[UNIT_COLUMNS] = {at.factors<OFFSET>(u, 0), at.factors<OFFSET>(u, 1)};
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int c = 0; c < UNIT_COLUMNS; c++) {
        const RowUnit& unit = x[r * stride];
        const Whole sum = block.sums[u][r][c];
        total[r][c] = with_unit(total[r][c], has_own_zero ? without_zero<BITS>(sum, w[c], unit) : sum, w[c], unit);
      }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int c = 0; c < UNIT_COLUMNS; c++) wide_store(out + r * out_stride + c * WIDTH, total[r][c]);
}

template <int BITS, int OFFSET, int R>
NATIVE_INLINE int piece_blocks(int row, int count, const PiecePlace& at, const Piece<BITS>& piece, const RowUnit* rows,
                               long stride, float* out, long out_stride, Coming& coming) {
  for (; count - row >= R; row += R)
    piece_block<BITS, OFFSET, R>(at, piece, rows + row * stride + at.begin, stride, out + row * out_stride, out_stride,
                                 coming);
  return row;
}

// out [count][32] = rows [count] times the units of a panel.
template <int BITS, int OFFSET>
void piece_rows(const RowUnit* rows, long stride, int count, const UnitPanel& panel, float* out, long out_stride) {
  Piece<BITS> piece;
  const int units = Piece<BITS>::UNITS;
  Coming coming(panel, passes_of(count));
  for (int output = 0; output < UNIT_OUTPUTS; output += UNIT_COLUMNS * WIDTH)
    for (int begin = 0; begin < panel.count; begin += units) {
      const PiecePlace at(panel, begin, units, output);
      float* to = out + output;
      unpack<BITS, OFFSET>(at, piece);
      int row = piece_blocks<BITS, OFFSET, UNIT_ROWS>(0, count, at, piece, rows, stride, to, out_stride, coming);
      row = piece_blocks<BITS, OFFSET, 2>(row, count, at, piece, rows, stride, to, out_stride, coming);
      piece_blocks<BITS, OFFSET, 1>(row, count, at, piece, rows, stride, to, out_stride, coming);
    }
}

}  // namespace
#endif
