// Rows of keys and values in eight bits: the rule by which they are rounded, and how codes become numbers again.
//
// A row is what one token keeps of one KV head, its key or its value: x [n] in float32, and becomes n codes and one scale.
// - The scale is amax / 127 in float32, amax being the largest magnitude, rounded up to float16, and at most 65504.
// - A code is x / scale in float32, rounded to the nearest whole number, ties to even, and cut to [-127, 127].
// - Where amax / 127 is no normal float32, as in a row of zeros, the scale and all codes are 0.
// - A row with NaN or infinity is broken as a whole: its scale is NaN, its codes are 0. What attends to it is NaN, and noticed.
// It is read as code * scale. No row's codes or scale depend on another row.
//
// A code is a bfloat16 as it is, so that products take codes exactly, by whichever instructions, in the order of all tiles.
// Scales are multiplied where no product sees them: with scores those of keys, with weights those of values (`attention.h`).
#pragma once
#include "factors.h"
#include "tiles.h"

namespace {

struct Code {
  int8_t v;
};

enum { LARGEST_CODE = 127, BROKEN_SCALE = 0x7e00 };
const float LARGEST_SCALE = 65504.0f;

// Codes lie in lines of 16 outputs, on every class of machines.
template <> inline int place<Code>(int k, int n) { return in_lines(k, n); }
NATIVE_INLINE const Code* pair_at(const Code* tile, int pair, int col) { return tile + pair * 32 + col; }

#ifdef __AVX512F__
NATIVE_INLINE __m512 numbers_of(const Code* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
NATIVE_INLINE Lanes load(const Code* p) { return {numbers_of(p)}; }
// Whole numbers from -127 to 127.
NATIVE_INLINE void store(Code* p, Lanes x) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
// Codes of two inputs as bfloat16, the first one in the lower halves.
NATIVE_INLINE void store_pairs(Bf16* to, const Code* low, const Code* high) {
  __m512i lower = _mm512_srli_epi32(_mm512_castps_si512(numbers_of(low)), 16);
  _mm512_storeu_si512(to, _mm512_or_si512(lower, _mm512_castps_si512(numbers_of(high))));
}
#else
NATIVE_INLINE __m256 numbers_of(const Code* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
NATIVE_INLINE Lanes load(const Code* p) { return {numbers_of(p), numbers_of(p + 8)}; }
NATIVE_INLINE void store(Code* p, Lanes x) {
  __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  words = _mm256_permute4x64_epi64(words, 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
NATIVE_INLINE void store_pairs(Bf16* to, const Code* low, const Code* high) {
  for (int i = 0; i < 16; i += 8) {
    __m256i lower = _mm256_srli_epi32(_mm256_castps_si256(numbers_of(low + i)), 16);
    _mm256_storeu_si256((__m256i*)(to + 2 * i), _mm256_or_si256(lower, _mm256_castps_si256(numbers_of(high + i))));
  }
}
#endif
NATIVE_INLINE Wide even_of(const Code* p) { return numbers_of(p); }
NATIVE_INLINE Wide odd_of(const Code* p) { return numbers_of(p + 16); }

// A tile of codes as one of bfloat16, whose products take no other.
NATIVE_INLINE void to_bf16(const Code* tile, Bf16* out) {
#ifdef NATIVE_PAIRS
  for (int four = 0; four < 8; four++)
    for (int odd = 0; odd < 2; odd++) {
      const Code* first = tile + (four * 4 + odd) * 16;  // lies in the upper half
      store_pairs(out + four * 64 + odd * 32, first + 32, first);
    }
#else
  for (int pair = 0; pair < 16; pair++) store_pairs(out + pair * 32, tile + pair * 32, tile + pair * 32 + 16);
#endif
}

// What a model of W multiplies where keys and values are kept as K: tiles as they lie, but codes as bfloat16 where that has
// instructions of its own.
template <class W, class K> struct ReadAs {
  typedef K Type;
};
#if defined(NATIVE_PAIRS) || defined(NATIVE_TILES)
template <> struct ReadAs<Bf16, Code> {
  typedef Bf16 Type;
};
#endif

NATIVE_INLINE float number_of(Half h) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h.bits))); }
NATIVE_INLINE Half scale_of(float largest) {
  float least = largest / (float)LARGEST_CODE;
  least = least < LARGEST_SCALE ? least : LARGEST_SCALE;
  return {(uint16_t)_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(least), _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC))};
}

// The codes of a row, `count` a multiple of 16 with zeros behind its dimensions. Returns its scale.
NATIVE_INLINE Half to_codes(const float* x, int count, Code* codes) {
  Lanes largest = zero();
  unsigned finite = 0xffff;
  for (int j = 0; j < count; j += 16) {
    Lanes v = load(x + j);
    largest = larger(largest, absolute(v)), finite &= equal_lanes(v - v, zero());
  }
  const Half scale = finite == 0xffff ? scale_of(largest_of(largest)) : Half{BROKEN_SCALE};
  if (finite != 0xffff || !scale.bits) {
    memset((void*)codes, 0, count);
    return scale;
  }
  const Lanes by = all(number_of(scale)), most = all((float)LARGEST_CODE), least = all(-(float)LARGEST_CODE);
  for (int j = 0; j < count; j += 16) store(codes + j, smaller(larger(rounded(load(x + j) / by), least), most));
  return scale;
}

}  // namespace
