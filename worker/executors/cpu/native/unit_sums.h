// Sums of a unit's products for a register of outputs, in whole numbers. What becomes of them does not live here.
//
// VPDPBUSD adds four products to a sum of 32 bits. Without it VPMADDUBSW adds two products in 16 bits, which eight of them
// with codes of 4 bits cannot overflow (16 * 15 * 127 < 2^15): codes of 8 bits are taken as two halves, and their sums joined.
#pragma once
#include "lanes.h"

namespace {

#ifdef __AVX512F__
typedef __m512i Whole;
HF_INLINE Whole whole_load(const void* p) { return _mm512_loadu_si512(p); }
HF_INLINE Whole whole_zero() { return _mm512_setzero_si512(); }
HF_INLINE Whole whole_all(int x) { return _mm512_set1_epi32(x); }
HF_INLINE Whole bytes_below_16(Whole a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
HF_INLINE Whole upper_codes(Whole a) { return bytes_below_16(_mm512_srli_epi16(a, 4)); }
HF_INLINE Whole whole_minus(Whole a, Whole b) { return _mm512_sub_epi32(a, b); }
HF_INLINE Whole whole_plus(Whole a, Whole b) { return _mm512_add_epi32(a, b); }
HF_INLINE Whole pair_products(Whole a, Whole b) { return _mm512_madd_epi16(a, b); }
HF_INLINE Whole words_all(int x) { return _mm512_set1_epi16((short)x); }
HF_INLINE Whole code_products(Whole u, Whole q) { return _mm512_maddubs_epi16(u, q); }
HF_INLINE Whole widened_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
HF_INLINE Wide wide_of(Whole a) { return _mm512_cvtepi32_ps(a); }
HF_INLINE Wide wide_times(Wide a, Wide b) { return _mm512_mul_ps(a, b); }
HF_INLINE Wide wide_halves(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
HF_INLINE Wide wide_bfloats(const void* p) { return load((const Bf16*)p).v; }
#define HF_ANY_REGISTER "v"
#else
typedef __m256i Whole;
HF_INLINE Whole whole_load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
HF_INLINE Whole whole_zero() { return _mm256_setzero_si256(); }
HF_INLINE Whole whole_all(int x) { return _mm256_set1_epi32(x); }
HF_INLINE Whole bytes_below_16(Whole a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
HF_INLINE Whole upper_codes(Whole a) { return bytes_below_16(_mm256_srli_epi16(a, 4)); }
HF_INLINE Whole whole_minus(Whole a, Whole b) { return _mm256_sub_epi32(a, b); }
HF_INLINE Whole whole_plus(Whole a, Whole b) { return _mm256_add_epi32(a, b); }
HF_INLINE Whole pair_products(Whole a, Whole b) { return _mm256_madd_epi16(a, b); }
HF_INLINE Whole words_all(int x) { return _mm256_set1_epi16((short)x); }
HF_INLINE Whole code_products(Whole u, Whole q) { return _mm256_maddubs_epi16(u, q); }
HF_INLINE Whole widened_bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
HF_INLINE Wide wide_of(Whole a) { return _mm256_cvtepi32_ps(a); }
HF_INLINE Wide wide_times(Wide a, Wide b) { return _mm256_mul_ps(a, b); }
HF_INLINE Wide wide_halves(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
HF_INLINE Wide wide_bfloats(const void* p) { return widened((const Bf16*)p); }
#define HF_ANY_REGISTER "x"
#endif
HF_INLINE Whole four_bytes(const void* p) {
  int bytes;
  memcpy(&bytes, p, 4);
  return whole_all(bytes);
}

#ifdef HF_VNNI
#ifdef __AVX512VNNI__
HF_INLINE Whole add_four(Whole sum, Whole u, Whole q) { return _mm512_dpbusd_epi32(sum, u, q); }
#else  // in software, for tests
HF_INLINE Whole bytes_of_words(Whole words, bool odd) { return odd ? _mm256_srai_epi16(words, 8) : _mm256_srai_epi16(_mm256_slli_epi16(words, 8), 8); }
HF_INLINE Whole add_four(Whole sum, Whole u, Whole q) {
  const Whole even = pair_products(_mm256_and_si256(u, words_all(255)), bytes_of_words(q, false));
  return whole_plus(sum, whole_plus(even, pair_products(_mm256_srli_epi16(u, 8), bytes_of_words(q, true))));
}
#endif

// A line of codes of a register of outputs.
template <int BITS> struct CodeLine {
  Whole low, high;
  HF_INLINE_MEMBER explicit CodeLine(const uint8_t* p) : low(whole_load(p)), high(low) {
    if (BITS == 4) high = upper_codes(low), low = bytes_below_16(low);
  }
};
template <int BITS> struct UnitSum {
  Whole sum = whole_zero();
  HF_INLINE_MEMBER void add(int i, const CodeLine<BITS>& line, const int8_t* q) {
    sum = add_four(sum, line.low, four_bytes(q + 4 * i));
    if (BITS == 4) sum = add_four(sum, line.high, four_bytes(q + 16 + 4 * i));
  }
  HF_INLINE_MEMBER Whole total() const { return sum; }
};
#else
template <int BITS> struct CodeLine {
  Whole low, high;
  HF_INLINE_MEMBER explicit CodeLine(const uint8_t* p) {
    const Whole both = whole_load(p);
    low = bytes_below_16(both), high = upper_codes(both);
  }
};
// In assembly, or GCC adds in the order of a tree, for which it keeps more products than there are registers.
HF_INLINE void add_words(Whole& sum, Whole words) {
  asm("vpaddw %1, %0, %0" : "+" HF_ANY_REGISTER(sum) : HF_ANY_REGISTER(words));
}
HF_INLINE void add_or_begin(bool begun, Whole& sum, Whole u, Whole q) {
  if (begun) add_words(sum, code_products(u, q));
  else sum = code_products(u, q);
}
template <int BITS> struct UnitSum {
  Whole low, high;  // of 8 bits, the sums of the codes' halves
  HF_INLINE_MEMBER void add(int i, const CodeLine<BITS>& line, const int8_t* q) {
    const Whole first = four_bytes(q + 4 * i);
    add_or_begin(i, low, line.low, first);
    if (BITS == 4) add_or_begin(true, low, line.high, four_bytes(q + 16 + 4 * i));
    else add_or_begin(i, high, line.high, first);
  }
  HF_INLINE_MEMBER Whole total() const {
    const Whole sum = pair_products(low, words_all(1));
    return BITS == 4 ? sum : whole_plus(sum, pair_products(high, words_all(16)));
  }
};
#endif

}  // namespace
