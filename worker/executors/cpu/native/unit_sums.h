// Sums of a unit's products for a register of outputs, in whole numbers. What becomes of them does not live here.
//
// VPDPBUSD adds four products to a sum of 32 bits. Without it VPMADDUBSW adds two products in 16 bits, which eight of them
// with codes of 4 bits cannot overflow (16 * 15 * 127 < 2^15); of codes of 5 bits four are added in 16 bits (8 * 31 * 127), of
// codes of 6 bits two (4 * 63 * 127), and then in 32. Codes of 8 bits are multiplied as words, by VPMADDWD: a row's words are
// whole, so that they need no far lines.
#pragma once
#include "row_units.h"

namespace {

#ifdef __AVX512F__
typedef __m512i Whole;
NATIVE_INLINE Whole whole_load(const void* p) { return _mm512_loadu_si512(p); }
NATIVE_INLINE Whole whole_zero() { return _mm512_setzero_si512(); }
NATIVE_INLINE Whole whole_all(int x) { return _mm512_set1_epi32(x); }
NATIVE_INLINE Whole bytes_below_16(Whole a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
NATIVE_INLINE Whole upper_codes(Whole a) { return bytes_below_16(_mm512_srli_epi16(a, 4)); }
NATIVE_INLINE Whole whole_minus(Whole a, Whole b) { return _mm512_sub_epi32(a, b); }
NATIVE_INLINE Whole whole_plus(Whole a, Whole b) { return _mm512_add_epi32(a, b); }
NATIVE_INLINE Whole pair_products(Whole a, Whole b) { return _mm512_madd_epi16(a, b); }
NATIVE_INLINE Whole words_all(int x) { return _mm512_set1_epi16((short)x); }
NATIVE_INLINE Whole code_products(Whole u, Whole q) { return _mm512_maddubs_epi16(u, q); }
NATIVE_INLINE Whole words_minus(Whole a, Whole b) { return _mm512_sub_epi16(a, b); }
NATIVE_INLINE Whole words_times(Whole a, Whole b) { return _mm512_mullo_epi16(a, b); }
NATIVE_INLINE Whole widened_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
NATIVE_INLINE Whole widened_signs(const uint8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
NATIVE_INLINE Whole whole_times(Whole a, Whole b) { return _mm512_mullo_epi32(a, b); }
NATIVE_INLINE Whole whole_or(Whole a, Whole b) { return _mm512_or_si512(a, b); }
NATIVE_INLINE Whole whole_and(Whole a, Whole b) { return _mm512_and_si512(a, b); }
NATIVE_INLINE Whole bits_of(Whole a, int mask) { return _mm512_and_si512(a, _mm512_set1_epi8((char)mask)); }
NATIVE_INLINE Whole whole_right_by(Whole a, int n) { return _mm512_srlv_epi32(a, whole_all(n)); }
NATIVE_INLINE Whole whole_left_by(Whole a, int n) { return _mm512_sllv_epi32(a, whole_all(n)); }
NATIVE_INLINE Whole whole_left_each(Whole a, Whole n) { return _mm512_sllv_epi32(a, n); }
template <int N> NATIVE_INLINE Whole whole_left(Whole a) { return _mm512_slli_epi32(a, N); }
template <int N> NATIVE_INLINE Whole words_right(Whole a) { return _mm512_srli_epi16(a, N); }
template <int N> NATIVE_INLINE Whole words_left(Whole a) { return _mm512_slli_epi16(a, N); }
NATIVE_INLINE Wide wide_of(Whole a) { return _mm512_cvtepi32_ps(a); }
NATIVE_INLINE Wide wide_minus(Wide a) {
  return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x80000000)));
}
NATIVE_INLINE Wide wide_halves(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
NATIVE_INLINE Wide wide_bfloats(const void* p) { return load((const Bf16*)p).v; }
#define NATIVE_ANY_REGISTER "v"
#else
typedef __m256i Whole;
NATIVE_INLINE Whole whole_load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
NATIVE_INLINE Whole whole_zero() { return _mm256_setzero_si256(); }
NATIVE_INLINE Whole whole_all(int x) { return _mm256_set1_epi32(x); }
NATIVE_INLINE Whole bytes_below_16(Whole a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
NATIVE_INLINE Whole upper_codes(Whole a) { return bytes_below_16(_mm256_srli_epi16(a, 4)); }
NATIVE_INLINE Whole whole_minus(Whole a, Whole b) { return _mm256_sub_epi32(a, b); }
NATIVE_INLINE Whole whole_plus(Whole a, Whole b) { return _mm256_add_epi32(a, b); }
NATIVE_INLINE Whole pair_products(Whole a, Whole b) { return _mm256_madd_epi16(a, b); }
NATIVE_INLINE Whole words_all(int x) { return _mm256_set1_epi16((short)x); }
NATIVE_INLINE Whole code_products(Whole u, Whole q) { return _mm256_maddubs_epi16(u, q); }
NATIVE_INLINE Whole words_minus(Whole a, Whole b) { return _mm256_sub_epi16(a, b); }
NATIVE_INLINE Whole words_times(Whole a, Whole b) { return _mm256_mullo_epi16(a, b); }
NATIVE_INLINE Whole widened_bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
NATIVE_INLINE Whole widened_signs(const uint8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
NATIVE_INLINE Whole whole_times(Whole a, Whole b) { return _mm256_mullo_epi32(a, b); }
NATIVE_INLINE Whole whole_or(Whole a, Whole b) { return _mm256_or_si256(a, b); }
NATIVE_INLINE Whole whole_and(Whole a, Whole b) { return _mm256_and_si256(a, b); }
NATIVE_INLINE Whole bits_of(Whole a, int mask) { return _mm256_and_si256(a, _mm256_set1_epi8((char)mask)); }
NATIVE_INLINE Whole whole_right_by(Whole a, int n) { return _mm256_srlv_epi32(a, whole_all(n)); }
NATIVE_INLINE Whole whole_left_by(Whole a, int n) { return _mm256_sllv_epi32(a, whole_all(n)); }
NATIVE_INLINE Whole whole_left_each(Whole a, Whole n) { return _mm256_sllv_epi32(a, n); }
template <int N> NATIVE_INLINE Whole whole_left(Whole a) { return _mm256_slli_epi32(a, N); }
template <int N> NATIVE_INLINE Whole words_right(Whole a) { return _mm256_srli_epi16(a, N); }
template <int N> NATIVE_INLINE Whole words_left(Whole a) { return _mm256_slli_epi16(a, N); }
NATIVE_INLINE Wide wide_of(Whole a) { return _mm256_cvtepi32_ps(a); }
NATIVE_INLINE Wide wide_minus(Wide a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
NATIVE_INLINE Wide wide_halves(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
NATIVE_INLINE Wide wide_bfloats(const void* p) { return widened((const Bf16*)p); }
#define NATIVE_ANY_REGISTER "x"
#endif
#ifdef NATIVE_VNNI
enum { CODE_BYTES = 64, IN_WHOLE_BYTES = 1 };
#else
enum { CODE_BYTES = 64, IN_WHOLE_BYTES = 0 };  // a line of codes; whether products take codes of 8 bits as they are
#endif
NATIVE_INLINE Whole four_bytes(const void* p) {
  int bytes;
  memcpy(&bytes, p, 4);
  return whole_all(bytes);
}

// The even and the odd bytes of a line as words: inputs 0 and 2, 1 and 3.
NATIVE_INLINE Whole even_bytes(Whole line) { return whole_and(line, words_all(255)); }
NATIVE_INLINE Whole odd_bytes(Whole line) { return words_right<8>(line); }
// The lower word of each number, in both.
NATIVE_INLINE Whole both_words(Whole a) { return whole_or(whole_and(a, whole_all(0xffff)), whole_left<16>(a)); }

// A line of codes of a register of outputs: those of inputs 4i onwards and of inputs 16 + 4i onwards; of 8 bits, of the former
// alone, without VNNI its even and its odd ones as words.
template <int BITS> struct CodeLine {
  Whole low, high;
};

// The codes of a unit for a register of outputs. In the line of fifth bits, codes 4i (and on) and 16 + 4i have, for i from 0 on,
// bits 4 and 5, 6 and 7, 0 and 1, 2 and 3; in two lines of fifth and sixth ones, bits 4 and 5 and 6 and 7 of the first
// line, 0 and 1 and 2 and 3 of it, and the same of the second one.
template <int BITS> struct UnitCodes {
  const uint8_t* first = nullptr;
  UnitCodes() = default;
  NATIVE_INLINE_MEMBER explicit UnitCodes(const uint8_t* p) : first(p) {}
  NATIVE_INLINE_MEMBER CodeLine<BITS> line(int i) const {
    const Whole both = whole_load(first + i * CODE_BYTES);
    if (BITS == 8)
      return IN_WHOLE_BYTES ? CodeLine<BITS>{both, both} : CodeLine<BITS>{even_bytes(both), odd_bytes(both)};
    CodeLine<BITS> out = {bytes_below_16(both), upper_codes(both)};
    if (BITS == 5) {
      Whole more = whole_load(first + 4 * CODE_BYTES);
      if (i >= 2) more = words_left<4>(more);
      if (i % 2) more = words_right<2>(more);
      out.low = whole_or(out.low, bits_of(more, 0x10)),
      out.high = whole_or(out.high, bits_of(words_right<1>(more), 0x10));
    }
    if (BITS == 6) {
      Whole more = whole_load(first + (4 + i / 2) * CODE_BYTES);
      if (i % 2) more = words_left<4>(more);
      out.low = whole_or(out.low, bits_of(more, 0x30)),
      out.high = whole_or(out.high, bits_of(words_right<2>(more), 0x30));
    }
    return out;
  }
  // Those of inputs 4 * `at` onwards alone.
  NATIVE_INLINE_MEMBER Whole far(int at) const {
    if (BITS == 8) return whole_load(first + at * CODE_BYTES);
    const Whole codes = bytes_below_16(whole_right_by(whole_load(first + (at & 3) * CODE_BYTES), at & 4));
    if (BITS == 4) return codes;
    const int more = BITS - 4, per_half = BITS == 5 ? 4 : 2, place = 2 * (at & 3) + (at >> 2),
              in_half = place % per_half;
    const Whole plane = whole_load(first + (4 + place / (2 * per_half)) * CODE_BYTES);
    const bool in_lower = place / per_half % 2;
    const Whole bits = in_lower ? whole_left_by(plane, 4 - in_half * more) : whole_right_by(plane, in_half * more);
    return whole_or(codes, bits_of(bits, ((1 << more) - 1) << 4));
  }
};

#ifdef NATIVE_VNNI
#ifdef __AVX512VNNI__
NATIVE_INLINE Whole add_four(Whole sum, Whole u, Whole q) { return _mm512_dpbusd_epi32(sum, u, q); }
NATIVE_INLINE Whole add_pairs(Whole sum, Whole a, Whole b) { return _mm512_dpwssd_epi32(sum, a, b); }
#else  // in software, for tests
NATIVE_INLINE Whole bytes_of_words(Whole words, bool odd) {
  return odd ? _mm256_srai_epi16(words, 8) : _mm256_srai_epi16(_mm256_slli_epi16(words, 8), 8);
}
NATIVE_INLINE Whole add_four(Whole sum, Whole u, Whole q) {
  const Whole even = pair_products(_mm256_and_si256(u, words_all(255)), bytes_of_words(q, false));
  return whole_plus(sum, whole_plus(even, pair_products(_mm256_srli_epi16(u, 8), bytes_of_words(q, true))));
}
NATIVE_INLINE Whole add_pairs(Whole sum, Whole a, Whole b) { return whole_plus(sum, pair_products(a, b)); }
#endif

// Adds FAR times the products of the far line.
template <int BITS> NATIVE_INLINE Whole add_far(Whole sum, Whole codes, const int8_t* q) {
  if (BITS == 8) return whole_plus(sum, whole_left<FAR_BITS>(add_four(whole_zero(), codes, four_bytes(q))));
  return add_pairs(sum, code_products(codes, four_bytes(q)), words_all(FAR));
}

// Which halves of the bytes the codes of 4 bits of a line are, and by what their products are shifted: upper halves are not
// moved down first. From memory, as broadcasts of what lies there take no instruction of their own.
const int HALVES_OF_LINE[8] = {0x0f0f0f0f,      0x0f0f0f0f,      0x0f0f0f0f,      0x0f0f0f0f,
                               (int)0xf0f0f0f0, (int)0xf0f0f0f0, (int)0xf0f0f0f0, (int)0xf0f0f0f0};
const int SHIFT_OF_LINE[8] = {FAR_BITS,     FAR_BITS,     FAR_BITS,     FAR_BITS,
                              FAR_BITS - 4, FAR_BITS - 4, FAR_BITS - 4, FAR_BITS - 4};

// FAR times the products of the far line.
template <int BITS> NATIVE_INLINE Whole far_products(const UnitCodes<BITS>& codes, const RowUnit& x) {
  if (BITS != 4) return add_far<BITS>(whole_zero(), codes.far(x.line), x.far);
  const Whole both = whole_load(codes.first + (x.line & 3) * CODE_BYTES);
  const Whole products =
      add_four(whole_zero(), whole_and(both, four_bytes(HALVES_OF_LINE + x.line)), four_bytes(x.far));
  return whole_left_each(products, four_bytes(SHIFT_OF_LINE + x.line));
}

// In two sums, as each instruction waits for the one before: lower and upper halves, or, of 8 bits, the first and last lines.
template <int BITS> struct UnitSum {
  Whole low, high;
  NATIVE_INLINE_MEMBER void begin() { low = high = whole_zero(); }
  NATIVE_INLINE_MEMBER void begin_far(const UnitCodes<BITS>& codes, const RowUnit& x) {
    low = whole_zero(), high = far_products<BITS>(codes, x);
  }
  NATIVE_INLINE_MEMBER void add(int i, bool is_upper, Whole codes, const RowUnit& x) {
    Whole& to = is_upper || i >= 4 ? high : low;
    to = add_four(to, codes, four_bytes(x.q + 16 * is_upper + 4 * i));
  }
  NATIVE_INLINE_MEMBER Whole total() const { return whole_plus(low, high); }
  NATIVE_INLINE_MEMBER Whole first() const { return low; }  // of 6 bits, whose halves do not begin with far lines
  NATIVE_INLINE_MEMBER Whole second() const { return high; }
};
template <int BITS> constexpr bool begins_far = BITS != 6;
template <int BITS> constexpr bool lacks_far = true;  // whether sums need what far lines add
#else
template <int BITS> constexpr bool begins_far = false;
template <int BITS> constexpr bool lacks_far = BITS != 8;
// In assembly, or GCC adds in the order of a tree, for which it keeps more products than there are registers.
NATIVE_INLINE void add_words(Whole& sum, Whole words) {
  asm("vpaddw %1, %0, %0" : "+" NATIVE_ANY_REGISTER(sum) : NATIVE_ANY_REGISTER(words));
}
NATIVE_INLINE void add_whole(Whole& sum, Whole numbers) {
  asm("vpaddd %1, %0, %0" : "+" NATIVE_ANY_REGISTER(sum) : NATIVE_ANY_REGISTER(numbers));
}
NATIVE_INLINE void add_or_begin(bool begun, Whole& sum, Whole u, Whole q) {
  if (begun) add_words(sum, code_products(u, q));
  else sum = code_products(u, q);
}
NATIVE_INLINE Whole sum_of_pairs(Whole words) { return pair_products(words, words_all(1)); }
NATIVE_INLINE void add_or_begin_words(bool begun, Whole& sum, Whole u, Whole q) {
  if (begun) add_whole(sum, pair_products(u, q));
  else sum = pair_products(u, q);
}
template <int BITS> NATIVE_INLINE Whole add_far(Whole sum, Whole codes, const int8_t* q) {
  return whole_plus(sum, pair_products(code_products(codes, four_bytes(q)), words_all(FAR)));
}
template <int BITS> struct UnitSum {
  Whole words;
  NATIVE_INLINE_MEMBER void begin() {}
  NATIVE_INLINE_MEMBER void add(int i, bool is_upper, Whole codes, const RowUnit& x) {
    add_or_begin(is_upper || i, words, codes, four_bytes(x.q + 16 * is_upper + 4 * i));
  }
  NATIVE_INLINE_MEMBER Whole total() const { return sum_of_pairs(words); }
};
template <> struct UnitSum<8> {
  Whole sum;
  NATIVE_INLINE_MEMBER void begin() {}
  NATIVE_INLINE_MEMBER void add(int i, bool is_odd, Whole codes, const RowUnit& x) {
    add_or_begin_words(is_odd || i, sum, codes, four_bytes(x.words + 4 * i + 2 * is_odd));
  }
  NATIVE_INLINE_MEMBER Whole total() const { return sum; }
};
template <> struct UnitSum<5> {
  Whole words, sum;
  NATIVE_INLINE_MEMBER void begin() { sum = whole_zero(); }
  NATIVE_INLINE_MEMBER void add(int i, bool is_upper, Whole codes, const RowUnit& x) {
    add_or_begin(is_upper || i % 2, words, codes, four_bytes(x.q + 16 * is_upper + 4 * i));
    if (is_upper && i % 2) sum = whole_plus(sum, sum_of_pairs(words));
  }
  NATIVE_INLINE_MEMBER Whole total() const { return sum; }
};
template <> struct UnitSum<6> {
  Whole words[2], sums[2];
  NATIVE_INLINE_MEMBER void begin() { sums[0] = sums[1] = whole_zero(); }
  NATIVE_INLINE_MEMBER void add(int i, bool is_upper, Whole codes, const RowUnit& x) {
    add_or_begin(i % 2, words[is_upper], codes, four_bytes(x.q + 16 * is_upper + 4 * i));
    if (i % 2) sums[is_upper] = whole_plus(sums[is_upper], sum_of_pairs(words[is_upper]));
  }
  NATIVE_INLINE_MEMBER Whole first() const { return sums[0]; }
  NATIVE_INLINE_MEMBER Whole second() const { return sums[1]; }
};
#endif

}  // namespace
