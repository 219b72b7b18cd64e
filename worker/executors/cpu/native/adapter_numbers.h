// Matrices of low-rank adapters as their files have them, and their numbers rounded to the model's dtype.
#pragma once
#include <string.h>

#include <algorithm>

#include "decoder.h"
#include "lanes.h"

namespace {

enum { LANES = 16, EIGHT = 8, FLOAT64 = 3 };  // FLOAT64: of a file alone

inline int bytes_of(int dtype) { return dtype == FLOAT64 ? 8 : dtype == holdfast::FLOAT32 ? 4 : 2; }

// Numbers of a row of a matrix. None: zeros.
struct Numbers {
  const char* first = nullptr;
  int dtype = holdfast::FLOAT32;
  long count = 0;
  const long* columns = nullptr;  // [count] where each lies; null: each `step` behind the last
  long step = 1;

  // The k-th and those after it; zeros behind the last one.
  NATIVE_INLINE_MEMBER __m256 eight(long k) const {
    if (k + EIGHT > count || !is_run()) return some(k);
    return read(first + k * bytes_of(dtype));
  }
  __m256 some(long k) const {
    const int bytes = bytes_of(dtype);
    alignas(32) char filled[EIGHT * 8] = {};
    for (long i = 0; i < EIGHT && k + i < count; i++)
      memcpy(filled + i * bytes, first + (columns ? columns[k + i] : k + i) * step * bytes, bytes);
    return read(filled);
  }
  NATIVE_INLINE_MEMBER bool is_run() const { return !columns && step == 1; }
  NATIVE_INLINE_MEMBER __m256 read(const char* at) const {
    if (dtype == holdfast::BFLOAT16) return widened((const Bf16*)at);
    if (dtype == holdfast::FLOAT16) return widened((const Half*)at);
    if (dtype == holdfast::FLOAT32) return _mm256_loadu_ps((const float*)at);
    return _mm256_set_m128(_mm256_cvtpd_ps(_mm256_loadu_pd((const double*)at + 4)),
                           _mm256_cvtpd_ps(_mm256_loadu_pd((const double*)at)));
  }
};

inline Numbers row_of_a(const NativeLowRank& part, int rank, long inputs, const long* columns) {
  return {(const char*)part.a + rank * part.a_stride * bytes_of(part.a_dtype), part.a_dtype, inputs, columns,
          part.a_step};
}
inline Numbers row_of_b(const NativeLowRank& part, long row) {
  return {(const char*)part.b + row * part.b_stride * bytes_of(part.b_dtype), part.b_dtype, part.rank, nullptr,
          part.b_step};
}

// Rounded to the dtype, each in the lower bits of 32; and back.
template <int DTYPE> NATIVE_INLINE __m256i kept(__m256 v) {
  if (DTYPE == holdfast::BFLOAT16) {  // as `to_bf16`; what is no number is refused
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  }
  if (DTYPE == holdfast::FLOAT32) return _mm256_castps_si256(v);
  return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// `IS_KEPT`: most rows are of that dtype as they are, as that of one module's matrix is.
template <int DTYPE, bool IS_KEPT> NATIVE_INLINE __m256 rounded(const Numbers& row, long k) {
  if (IS_KEPT && k + EIGHT <= row.count && row.is_run()) {
    if (DTYPE == holdfast::FLOAT32) return _mm256_loadu_ps((const float*)row.first + k);
    return DTYPE == holdfast::BFLOAT16 ? widened((const Bf16*)row.first + k) : widened((const Half*)row.first + k);
  }
  const __m256 v = row.eight(k);
  if (DTYPE == holdfast::FLOAT32 || row.dtype == DTYPE) return v;
  const __m256i bits = kept<DTYPE>(v);
  if (DTYPE == holdfast::BFLOAT16) return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  return _mm256_cvtph_ps(low_words(bits));
}

// Sixteen from the k-th on, rounded to a dtype of 16 bits.
template <int DTYPE> NATIVE_INLINE __m256i sixteen(const Numbers& row, long k) {
  if (row.dtype == DTYPE && row.is_run() && k + LANES <= row.count)
    return _mm256_loadu_si256((const __m256i*)(row.first + k * 2));
  const __m256i both = _mm256_packus_epi32(kept<DTYPE>(row.eight(k)), kept<DTYPE>(row.eight(k + EIGHT)));
  return _mm256_permute4x64_epi64(both, 0xd8);
}

// What `fn` says of a dtype, which it has as a type.
template <class Fn> int for_dtype(int dtype, Fn&& fn) {
  if (dtype == holdfast::BFLOAT16) return fn(std::integral_constant<int, holdfast::BFLOAT16>());
  if (dtype == holdfast::FLOAT16) return fn(std::integral_constant<int, holdfast::FLOAT16>());
  return fn(std::integral_constant<int, holdfast::FLOAT32>());
}

}  // namespace
