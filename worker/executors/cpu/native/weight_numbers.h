// Numbers of weights in the dtypes of files, eight at a time, in float32: reading, rounding, the largest magnitude.
// Needs AVX2 and F16C.
#pragma once
#include <float.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace {

enum Dtype { BF16, F16, F32 };

inline __m256 loaded(const void* p, long i, int dtype) {
  if (dtype == F32) return _mm256_loadu_ps((const float*)p + i);
  __m128i half = _mm_loadu_si128((const __m128i*)((const uint16_t*)p + i));
  if (dtype == F16) return _mm256_cvtph_ps(half);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

// The number of a dtype that is nearest, ties to even.
inline float rounded(float x, int dtype) {
  if (dtype == F32) return x;
  if (dtype == F16) return _cvtsh_ss(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  return memcpy(&x, &bits, 4), x;
}

inline float largest_of(__m256 a) {
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}

}  // namespace
