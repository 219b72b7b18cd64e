// Codes of 4 bits, chosen once at load: whole numbers from -8 to 7, and a scale for each group of inputs, which of
// several has the smallest squared error. Errors are compared by sums of whole numbers, which are exact in any order; a
// code is number / scale, rounded to even. What is computed with them does not live here. Compiled for AVX2.
#include <float.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace {

enum Dtype { BF16, F16, F32 };
// Groups are searched eight at a time, one in each lane; a group has a multiple of HALVES inputs.
enum { MOST = 256, EIGHT = 8, HALVES = 16 };
// A group's largest magnitude is tried at FEWEST to FURTHEST steps of 1 / STEPS scales from zero, on either side.
enum { STEPS = 4, FEWEST = 6 * STEPS, FURTHEST = 9 * STEPS };
enum { FRACTION = 11, ONE = 32767 };

struct Groups {
  alignas(32) float x[EIGHT][MOST];
  // x / largest in 1 / ONE: of two neighbouring inputs, those of each group.
  alignas(32) int32_t pairs[MOST / 2][EIGHT];
  float largest[EIGHT];
};

__m256 loaded(const void* p, long i, int dtype) {
  if (dtype == F32) return _mm256_loadu_ps((const float*)p + i);
  __m128i half = _mm_loadu_si128((const __m128i*)((const uint16_t*)p + i));
  if (dtype == F16) return _mm256_cvtph_ps(half);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

// The number of a dtype that is nearest, ties to even.
float rounded(float x, int dtype) {
  if (dtype == F32) return x;
  if (dtype == F16) return _cvtsh_ss(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  return memcpy(&x, &bits, 4), x;
}

float largest_of(__m256 a) {
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}

// Halfwords of 16 numbers, in order.
__m256i halves(__m256 a, __m256 b) {
  __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));
  return _mm256_permute4x64_epi64(words, 0xd8);
}

void put_pairs(Groups& all, int g, int group) {
  __m256 factor = _mm256_set1_ps(all.largest[g] > 0 ? ONE / all.largest[g] : 0);
  alignas(32) int32_t pairs[HALVES / 2];
  for (int i = 0; i < group; i += HALVES) {
    const float* x = all.x[g] + i;
    __m256 low = _mm256_mul_ps(_mm256_load_ps(x), factor), high = _mm256_mul_ps(_mm256_load_ps(x + 8), factor);
    _mm256_store_si256((__m256i*)pairs, halves(low, high));
    for (int j = 0; j < HALVES / 2; j++) all.pairs[i / 2 + j][g] = pairs[j];
  }
}

// Reads a group. Returns false where a number is not finite.
bool read_group(Groups& all, int g, const void* p, long first, int group, int dtype) {
  __m256 most = _mm256_setzero_ps(), odd = most, end = _mm256_set1_ps(FLT_MAX), sign = _mm256_set1_ps(-0.0f);
  for (int i = 0; i < group; i += 8) {
    __m256 x = loaded(p, first + i, dtype), magnitude = _mm256_andnot_ps(sign, x);
    _mm256_store_ps(all.x[g] + i, x);
    most = _mm256_max_ps(most, magnitude);
    odd = _mm256_or_ps(odd, _mm256_cmp_ps(magnitude, end, _CMP_NLE_UQ));
  }
  all.largest[g] = largest_of(most);
  put_pairs(all, g, group);
  return !_mm256_movemask_ps(odd);
}

// Of each group: the sums of its codes with its numbers and with themselves, where the largest magnitude lies `steps`
// from zero.
void sums_by(const Groups& all, int group, int steps, __m256i& with_numbers, __m256i& with_selves) {
  __m256i factor = _mm256_set1_epi16((int16_t)(steps * (1 << FRACTION) / STEPS));
  __m256i whole = _mm256_set1_epi16(1 << (15 - FRACTION));  // of a product with it, what is left is rounded
  __m256i lowest = _mm256_set1_epi16(-8), highest = _mm256_set1_epi16(7);
  with_numbers = with_selves = _mm256_setzero_si256();
  for (int i = 0; i < group / 2; i++) {
    __m256i t = _mm256_load_si256((const __m256i*)all.pairs[i]);
    __m256i code = _mm256_mulhrs_epi16(_mm256_mulhrs_epi16(t, factor), whole);
    code = _mm256_min_epi16(_mm256_max_epi16(code, lowest), highest);
    with_numbers = _mm256_add_epi32(with_numbers, _mm256_madd_epi16(t, code));
    with_selves = _mm256_add_epi32(with_selves, _mm256_madd_epi16(code, code));
  }
}

// The best so far, of four groups.
struct Best {
  __m256d squared = _mm256_setzero_pd(), selves = _mm256_set1_pd(1), numbers = _mm256_setzero_pd();

  void take(__m128i with_numbers, __m128i with_selves) {
    __m256d own = _mm256_cvtepi32_pd(with_numbers), by = _mm256_cvtepi32_pd(with_selves);
    __m256d square = _mm256_mul_pd(own, own);
    __m256d is_more = _mm256_cmp_pd(_mm256_mul_pd(square, selves), _mm256_mul_pd(squared, by), _CMP_GT_OQ);
    squared = _mm256_blendv_pd(squared, square, is_more);
    selves = _mm256_blendv_pd(selves, by, is_more);
    numbers = _mm256_blendv_pd(numbers, own, is_more);
  }
};

// The best scale of codes is sum(number * code) / sum(code * code), and takes the square of the first sum over the
// second off the squared error: the codes for which that is most are chosen, the first of equal ones. Scales are of the
// dtype; what is too small for any is zero, by a scale of one.
void search(const Groups& all, int group, int dtype, float* scales) {
  Best first, last;
  for (int steps = FEWEST; steps <= FURTHEST; steps++)
    for (int sign = 1; sign >= -1; sign -= 2) {
      __m256i with_numbers, with_selves;
      sums_by(all, group, sign * steps, with_numbers, with_selves);
      first.take(_mm256_castsi256_si128(with_numbers), _mm256_castsi256_si128(with_selves));
      last.take(_mm256_extracti128_si256(with_numbers, 1), _mm256_extracti128_si256(with_selves, 1));
    }
  alignas(32) double ratio[EIGHT];
  _mm256_store_pd(ratio, _mm256_div_pd(first.numbers, first.selves));
  _mm256_store_pd(ratio + 4, _mm256_div_pd(last.numbers, last.selves));
  for (int g = 0; g < EIGHT; g++) {
    scales[g] = rounded((float)(ratio[g] * all.largest[g] / ONE), dtype);
    if (scales[g] == 0) scales[g] = 1;
  }
}

// Codes and 8, two in a byte, the first in the low bits.
void write_codes(const float* x, int group, float scale, uint8_t* out) {
  __m256 by = _mm256_set1_ps(scale), low = _mm256_set1_ps(-8), high = _mm256_set1_ps(7);
  __m128i eights = _mm_set1_epi8(8), places = _mm_set1_epi16(0x1001);
  for (int i = 0; i < group; i += HALVES) {
    __m256 a = _mm256_div_ps(_mm256_load_ps(x + i), by), b = _mm256_div_ps(_mm256_load_ps(x + i + 8), by);
    a = _mm256_min_ps(_mm256_max_ps(a, low), high), b = _mm256_min_ps(_mm256_max_ps(b, low), high);
    __m256i words = halves(a, b);
    __m128i codes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    __m128i pairs = _mm_maddubs_epi16(_mm_add_epi8(codes, eights), places);
    _mm_storel_epi64((__m128i*)(out + i / 2), _mm_packus_epi16(pairs, pairs));
  }
}

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

// Codes, two in a byte, and scales [rows, groups] of weights [rows, columns], `stride` numbers from row to row. `group`
// inputs share a scale: a multiple of HALVES, MOST at most, that divides the columns. Scales are numbers of the weights'
// dtype. Returns 1 where a weight is not finite.
int native_search_codes(const void* weights, int dtype, long rows, long columns, long stride, int group, uint8_t* codes,
                        float* scales) {
  Groups all{};
  long groups = columns / group;
  for (long r = 0; r < rows; r++)
    for (long k = 0; k < groups; k += EIGHT) {
      int count = groups - k < EIGHT ? (int)(groups - k) : (int)EIGHT;
      for (int g = 0; g < count; g++)
        if (!read_group(all, g, weights, r * stride + (k + g) * group, group, dtype)) return 1;
      float found[EIGHT];
      search(all, group, dtype, found);
      for (int g = 0; g < count; g++) {
        scales[r * groups + k + g] = found[g];
        write_codes(all.x[g], group, found[g], codes + (r * columns + (k + g) * group) / 2);
      }
    }
  return 0;
}
}
