// Matrices of low-rank adapters as their files have them, and their numbers rounded to the model's dtype.
#pragma once
#include <string.h>

#include <algorithm>
#include <type_traits>

#include "decoder.h"
#include "lanes.h"

namespace {

enum { LANES = 16, EIGHT = 8, FLOAT64 = 3 };  // FLOAT64: of a file alone

inline int bytes_of(int dtype) { return dtype == FLOAT64 ? 8 : dtype == holdfast::FLOAT32 ? 4 : 2; }

// Eight numbers of a file's dtype.
template <int FROM> NATIVE_INLINE __m256 eight_at(const char* at) {
  if (FROM == holdfast::BFLOAT16) return widened((const Bf16*)at);
  if (FROM == holdfast::FLOAT16) return widened((const Half*)at);
  if (FROM == holdfast::FLOAT32) return _mm256_loadu_ps((const float*)at);
  return _mm256_set_m128(_mm256_cvtpd_ps(_mm256_loadu_pd((const double*)at + 4)),
                         _mm256_cvtpd_ps(_mm256_loadu_pd((const double*)at)));
}

// Numbers of a row of a matrix. None: zeros.
struct Numbers {
  const char* first = nullptr;
  int dtype = holdfast::FLOAT32;
  long count = 0;
  const long* columns = nullptr;  // [count] where each lies; null: each `step` behind the last
  long step = 1;

  // The k-th and those after it; zeros behind the last one.
  __m256 eight(long k) const {
    const int bytes = bytes_of(dtype);
    if (k + EIGHT <= count && is_run()) return read(first + k * bytes);
    alignas(32) char filled[EIGHT * 8] = {};
    for (long i = 0; i < EIGHT && k + i < count; i++)
      memcpy(filled + i * bytes, first + (columns ? columns[k + i] : k + i) * step * bytes, bytes);
    return read(filled);
  }
  __m256 read(const char* at) const {
    if (dtype == holdfast::BFLOAT16) return eight_at<holdfast::BFLOAT16>(at);
    if (dtype == holdfast::FLOAT16) return eight_at<holdfast::FLOAT16>(at);
    return dtype == holdfast::FLOAT32 ? eight_at<holdfast::FLOAT32>(at) : eight_at<FLOAT64>(at);
  }
  bool is_run() const { return !columns && step == 1; }
  int bytes() const { return bytes_of(dtype); }
};

// The same of whole eights that follow each other, of one dtype. Eight more may be read: content has as much behind it.
template <int FROM> struct Run {
  const char* first;

  Run() = default;
  explicit Run(const Numbers& row) : first(row.first) {}
  NATIVE_INLINE_MEMBER __m256 eight(long k) const { return eight_at<FROM>(first + k * bytes()); }
  static constexpr int bytes() { return FROM == holdfast::FLOAT32 ? 4 : 2; }
};

// What `fn` does with rows as a type: `Run` where they are such runs, else `Numbers`.
template <class Row> struct RowsOf {
  using Type = Row;
};
template <class Fn> void with_rows(int dtype, bool are_runs, Fn&& fn) {
  if (!are_runs || dtype == FLOAT64) return fn(RowsOf<Numbers>());
  if (dtype == holdfast::BFLOAT16) return fn(RowsOf<Run<holdfast::BFLOAT16>>());
  if (dtype == holdfast::FLOAT16) return fn(RowsOf<Run<holdfast::FLOAT16>>());
  return fn(RowsOf<Run<holdfast::FLOAT32>>());
}

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
  if (DTYPE == holdfast::BFLOAT16) {  // as `to_bf16`; NaN stays NaN, or is an infinity
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i is_none = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_andnot_si256(is_none, half)), 16);
  }
  if (DTYPE == holdfast::FLOAT32) return _mm256_castps_si256(v);
  return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
template <int DTYPE, class Row> NATIVE_INLINE __m256 rounded(const Row& row, long k) {
  const __m256 v = row.eight(k);
  if (DTYPE == holdfast::FLOAT32 || std::is_same<Row, Run<DTYPE>>::value) return v;
  const __m256i bits = kept<DTYPE>(v);
  if (DTYPE == holdfast::BFLOAT16) return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  return _mm256_cvtph_ps(low_words(bits));
}

// Sixteen from the k-th on, rounded to a dtype of 16 bits.
template <int DTYPE, class Row> NATIVE_INLINE __m256i sixteen(const Row& row, long k) {
  if (std::is_same<Row, Run<DTYPE>>::value) return _mm256_loadu_si256((const __m256i*)(row.first + k * 2));
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
