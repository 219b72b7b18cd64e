// Half tiles turned: 16 inputs of 16 outputs become 16 inputs of what were inputs, as `tile_order.h` places both.
//
// So the dimensions of keys that are values as well are read from the tiles of keys.
#pragma once
#include "codes.h"
#include "factors.h"

namespace {

// out [8] = the columns of rows [8] of eight numbers each, of 32 bits.
NATIVE_INLINE void turn_eight(const __m256i* rows, __m256i* out) {
  __m256i pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int half = 0; half < 2; half++) {
      fours[i + 2 * half] = _mm256_unpacklo_epi64(pairs[i + half], pairs[i + 2 + half]);
      fours[i + 2 * half + 1] = _mm256_unpackhi_epi64(pairs[i + half], pairs[i + 2 + half]);
    }
  for (int i = 0; i < 4; i++) {
    out[i] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x20);
    out[i + 4] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x31);
  }
}

// The same of sixteen rows of sixteen numbers of 16 bits.
NATIVE_INLINE void turn_sixteen(const __m256i* rows, __m256i* out) {
  __m256i pairs[16], fours[16], eights[16];  // numbers of one column side by side: of two rows, four, eight
  NATIVE_UNROLL
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm256_unpacklo_epi16(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_epi16(rows[i], rows[i + 1]);
  }
  NATIVE_UNROLL
  for (int i = 0; i < 16; i += 4) NATIVE_UNROLL
  for (int half = 0; half < 2; half++) {
    fours[i + 2 * half] = _mm256_unpacklo_epi32(pairs[i + half], pairs[i + 2 + half]);
    fours[i + 2 * half + 1] = _mm256_unpackhi_epi32(pairs[i + half], pairs[i + 2 + half]);
  }
  NATIVE_UNROLL
  for (int i = 0; i < 16; i += 8) NATIVE_UNROLL
  for (int j = 0; j < 4; j++) {
    eights[i + 2 * j] = _mm256_unpacklo_epi64(fours[i + j], fours[i + 4 + j]);
    eights[i + 2 * j + 1] = _mm256_unpackhi_epi64(fours[i + j], fours[i + 4 + j]);
  }
  NATIVE_UNROLL
  for (int i = 0; i < 8; i++) {
    out[i] = _mm256_permute2x128_si256(eights[i], eights[i + 8], 0x20);
    out[i + 8] = _mm256_permute2x128_si256(eights[i], eights[i + 8], 0x31);
  }
}

NATIVE_INLINE void turn_half(const float* from, float* to) {
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 16; j += 8) {
      __m256i rows[8], columns[8];
      for (int r = 0; r < 8; r++) rows[r] = _mm256_loadu_si256((const __m256i*)(from + (i + r) * 16 + j));
      turn_eight(rows, columns);
      for (int r = 0; r < 8; r++) _mm256_storeu_si256((__m256i*)(to + (j + r) * 16 + i), columns[r]);
    }
}

// Of 16 bits, where a row is pairs: the numbers of two inputs for each output. All inputs of one output are a column of
// pairs; two such columns, number by number, are a row again.
template <class K> NATIVE_INLINE void turn_half(const K* from, K* to) {
  constexpr bool in_order = !std::is_same<K, Bf16>::value || !FactorOf<Bf16>::AS_THEY_LIE;
  __m256i rows[16], inputs[16];
  for (int i = 0; i < 8; i++)
    for (int half = 0; half < 2; half++)
      rows[8 * half + i] = _mm256_loadu_si256((const __m256i*)(from + i * 32) + half);
  for (int half = 0; half < 2; half++) turn_eight(rows + 8 * half, inputs + 8 * half);
  if (!in_order)  // 2 0 3 1, of four, and so the rows
    for (__m256i& one : inputs) one = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(one, 0x8d), 0x8d);
  for (int i = 0; i < 8; i++) {
    const __m256i low = inputs[in_order ? 2 * i : i / 2 * 4 + 2 + i % 2],
                  high = inputs[in_order ? 2 * i + 1 : i / 2 * 4 + i % 2];
    const __m256i left = _mm256_unpacklo_epi16(low, high), right = _mm256_unpackhi_epi16(low, high);
    _mm256_storeu_si256((__m256i*)(to + i * 32), _mm256_permute2x128_si256(left, right, 0x20));
    _mm256_storeu_si256((__m256i*)(to + i * 32) + 1, _mm256_permute2x128_si256(left, right, 0x31));
  }
}

NATIVE_INLINE void turn_half(const Code* from, Code* to) {
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) to[place<Code>(j, i)] = from[place<Code>(i, j)];
}

}  // namespace
