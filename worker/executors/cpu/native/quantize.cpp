// Codes of 8 bits, made once at load by the largest magnitude of a row, and numbers of codes that files have. What is
// computed with them does not live here. Compiled for AVX2.
#include "weight_numbers.h"

namespace {

// E4M3, rounded to even, of a magnitude of 448 at most, by its bits: 3 bits of mantissa, exponents from -6 on, below that
// steps of 2^-9, which adding 2^14 rounds to.
__m256i e4m3(__m256 x) {
  const __m256i low = _mm256_set1_epi32(121 << 23), most = _mm256_set1_epi32(0x7ffff), one = _mm256_set1_epi32(1);
  const __m256 rounder = _mm256_castsi256_ps(_mm256_set1_epi32(141 << 23)), signs = _mm256_set1_ps(-0.0f);
  __m256i sign = _mm256_srli_epi32(_mm256_castps_si256(_mm256_and_ps(x, signs)), 24);
  __m256 magnitude = _mm256_andnot_ps(signs, x);
  __m256i bits = _mm256_castps_si256(magnitude);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 20), one);
  __m256i normal = _mm256_add_epi32(_mm256_sub_epi32(bits, _mm256_set1_epi32(120 << 23)), _mm256_add_epi32(most, odd));
  __m256i small =
      _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(magnitude, rounder)), _mm256_castps_si256(rounder));
  __m256i code = _mm256_blendv_epi8(_mm256_srli_epi32(normal, 20), small, _mm256_cmpgt_epi32(low, bits));
  return _mm256_or_si256(code, sign);
}

// Eight codes of 8 bits: numbers / scale, within `most`, rounded to even.
void write_eight(__m256 x, __m256 scale, __m256 most, bool floating, uint8_t* out) {
  __m256 steps = _mm256_div_ps(x, scale);
  steps = _mm256_max_ps(_mm256_min_ps(steps, most), _mm256_sub_ps(_mm256_setzero_ps(), most));
  __m256i codes = _mm256_and_si256(floating ? e4m3(steps) : _mm256_cvtps_epi32(steps), _mm256_set1_epi32(0xff));
  __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
  _mm_storel_epi64((__m128i*)out, _mm_packus_epi16(words, words));
}

// Eight numbers, of which `count` are there and the others 0.
__m256 some_loaded(const void* p, long i, int dtype, long count) {
  if (count >= 8) return loaded(p, i, dtype);
  const int bytes = dtype == F32 ? 4 : 2;
  alignas(32) char room[32] = {};
  memcpy(room, (const char*)p + i * bytes, count * bytes);
  return loaded(room, 0, dtype);
}

// The largest magnitude of a row of numbers. Returns false where one is not finite.
bool largest_of_row(const void* p, int dtype, long first, long columns, float& largest) {
  const __m256 end = _mm256_set1_ps(FLT_MAX), sign = _mm256_set1_ps(-0.0f);
  __m256 most = _mm256_setzero_ps(), odd = most;
  for (long k = 0; k < columns; k += 8) {
    const __m256 magnitude = _mm256_andnot_ps(sign, some_loaded(p, first + k, dtype, columns - k));
    most = _mm256_max_ps(most, magnitude);
    odd = _mm256_or_ps(odd, _mm256_cmp_ps(magnitude, end, _CMP_NLE_UQ));
  }
  largest = largest_of(most);
  return !_mm256_movemask_ps(odd);
}

// Numbers of codes: a code's value less the zero point, times the scale, each rounded to float32, and then to the dtype.
struct NumberTable {
  const float* values;  // [256]
  int dtype;
  alignas(32) float numbers[256];
  uint16_t halves[256];

  void fill(float zero, float scale) {
    const __m256 zeros = _mm256_set1_ps(zero), scales = _mm256_set1_ps(scale);
    for (int i = 0; i < 256; i += 8)
      _mm256_store_ps(numbers + i, _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(values + i), zeros), scales));
    if (dtype == F16)
      for (int i = 0; i < 256; i += 8)
        _mm_storeu_si128((__m128i*)(halves + i),
                         _mm256_cvtps_ph(_mm256_load_ps(numbers + i), _MM_FROUND_TO_NEAREST_INT));
    if (dtype == BF16)
      for (int i = 0; i < 256; i++)
        halves[i] = numbers[i] == numbers[i] ? upper_half(rounded(numbers[i], BF16)) : 0x7fc0;
  }
  static uint16_t upper_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)(bits >> 16);
  }
  void write(const uint8_t* codes, long count, void* out, long first) const {
    if (dtype == F32)
      for (long k = 0; k < count; k++) ((float*)out)[first + k] = numbers[codes[k]];
    else
      for (long k = 0; k < count; k++) ((uint16_t*)out)[first + k] = halves[codes[k]];
  }
};

}  // namespace

extern "C" {

// Codes of 8 bits of columns [first, last) of weights [rows, columns], `stride` numbers from row to row: out [rows,
// last - first]: E4M3 if `floating`, else whole numbers. And scales [rows], numbers of the weights' dtype, of all columns.
// Returns 1 where a weight is not finite.
int native_eight_bit_codes(const void* weights, int dtype, long rows, long columns, long stride, long first, long last,
                           int floating, uint8_t* codes, float* scales) {
  const float most = floating ? 448 : 127;
  for (long r = 0; r < rows; r++) {
    float largest;
    if (!largest_of_row(weights, dtype, r * stride, columns, largest)) return 1;
    scales[r] = rounded(largest / most, dtype);
    if (scales[r] == 0) scales[r] = 1;
    uint8_t* out = codes + r * (last - first);
    for (long k = first; k < last; k += 8, out += 8) {
      const long count = last - k;
      uint8_t room[8];
      write_eight(some_loaded(weights, r * stride + k, dtype, count), _mm256_set1_ps(scales[r]), _mm256_set1_ps(most),
                  floating, count < 8 ? room : out);
      if (count < 8) memcpy(out, room, count);
    }
  }
  return 0;
}

// Numbers of codes of 8 bits [rows, columns], `stride` bytes from row to row; `values` [256] says what each stands for.
// Columns up to each of `ends` share a zero point and a scale, [rows, runs]. `out` [rows]: where each row of numbers goes.
void native_numbers(const uint8_t* codes, long rows, long stride, int runs, const long* ends, const float* zeros,
                    const float* scales, const float* values, int dtype, void* const* out) {
  NumberTable table = {values, dtype, {}, {}};
  for (int run = 0; run < runs; run++) {
    const long first = run ? ends[run - 1] : 0;
    for (long r = 0; r < rows; r++) {
      const long at = r * runs + run;
      // Bits are compared: a scale that is no number equals none.
      if (r == 0 || memcmp(scales + at, scales + at - runs, 4) || memcmp(zeros + at, zeros + at - runs, 4))
        table.fill(zeros[at], scales[at]);
      table.write(codes + r * stride + first, ends[run] - first, out[r], first);
    }
  }
}
}
