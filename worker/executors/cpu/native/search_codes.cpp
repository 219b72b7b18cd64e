// Codes of 4 bits, chosen once at load: whole numbers from -8 to 7, and a scale for each group of inputs, which of
// several has the smallest squared error. Errors are compared by sums of whole numbers, which are exact in any order,
// so AVX2 and AVX-512 choose the same; a code is number / scale, rounded to even.
#include "weight_numbers.h"

namespace {

// A group has a multiple of HALVES inputs, MOST at most.
enum { MOST = 256, HALVES = 16 };
// A group's largest magnitude is tried at FEWEST to FURTHEST steps of 1 / STEPS scales from zero, on either side. Below
// UPPER no code is above 7, below LOWER none is under -8.
enum { STEPS = 4, FEWEST = 6 * STEPS, FURTHEST = 9 * STEPS, UPPER = 7 * STEPS + 2, LOWER = 8 * STEPS + 3 };
enum { FRACTION = 11, ONE = 32767 };

// Lanes of 32 bits, each of which is two halfwords: groups are searched LANES at a time, one in each. And numbers of
// float64, half as many.
#ifdef __AVX512BW__
enum { LANES = 16 };
using Words = __m512i;
using HalfWords = __m256i;
using Doubles = __m512d;
Words loaded_words(const int32_t* p) { return _mm512_load_si512(p); }
Words no_words() { return _mm512_setzero_si512(); }
Words all_halves(int x) { return _mm512_set1_epi16((int16_t)x); }
Words product(Words a, Words b) { return _mm512_mulhrs_epi16(a, b); }
Words smaller(Words a, Words b) { return _mm512_min_epi16(a, b); }
Words larger(Words a, Words b) { return _mm512_max_epi16(a, b); }
Words plus_products(Words sum, Words a, Words b) { return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)); }
HalfWords first_half(Words a) { return _mm512_castsi512_si256(a); }
HalfWords last_half(Words a) { return _mm512_extracti64x4_epi64(a, 1); }
Doubles doubles_of(HalfWords a) { return _mm512_cvtepi32_pd(a); }
Doubles all_doubles(double x) { return _mm512_set1_pd(x); }
void store_doubles(double* p, Doubles a) { _mm512_store_pd(p, a); }
using IsMore = __mmask8;
IsMore is_more(Doubles a, Doubles b) { return _mm512_cmp_pd_mask(a, b, _CMP_GT_OQ); }
Doubles chosen(IsMore which, Doubles a, Doubles b) { return _mm512_mask_mov_pd(b, which, a); }
#else
enum { LANES = 8 };
using Words = __m256i;
using HalfWords = __m128i;
using Doubles = __m256d;
Words loaded_words(const int32_t* p) { return _mm256_load_si256((const __m256i*)p); }
Words no_words() { return _mm256_setzero_si256(); }
Words all_halves(int x) { return _mm256_set1_epi16((int16_t)x); }
Words product(Words a, Words b) { return _mm256_mulhrs_epi16(a, b); }
Words smaller(Words a, Words b) { return _mm256_min_epi16(a, b); }
Words larger(Words a, Words b) { return _mm256_max_epi16(a, b); }
Words plus_products(Words sum, Words a, Words b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
HalfWords first_half(Words a) { return _mm256_castsi256_si128(a); }
HalfWords last_half(Words a) { return _mm256_extracti128_si256(a, 1); }
Doubles doubles_of(HalfWords a) { return _mm256_cvtepi32_pd(a); }
Doubles all_doubles(double x) { return _mm256_set1_pd(x); }
void store_doubles(double* p, Doubles a) { _mm256_store_pd(p, a); }
using IsMore = __m256d;
IsMore is_more(Doubles a, Doubles b) { return _mm256_cmp_pd(a, b, _CMP_GT_OQ); }
Doubles chosen(IsMore which, Doubles a, Doubles b) { return _mm256_blendv_pd(b, a, which); }
#endif

struct Groups {
  alignas(64) float x[LANES][MOST];
  // x / largest in 1 / ONE: of two neighbouring inputs, those of each group.
  alignas(64) int32_t pairs[MOST / 2][LANES];
  float largest[LANES];
};

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

// The codes of numbers of which the largest lies a factor of 1 / (1 << FRACTION) steps from zero.
template <bool UP, bool DOWN> Words codes_by(Words t, Words factor) {
  Words code = product(product(t, factor), all_halves(1 << (15 - FRACTION)));  // what is left is rounded
  if (DOWN) code = larger(code, all_halves(-8));
  if (UP) code = smaller(code, all_halves(7));
  return code;
}

// The best so far, of half the groups.
struct Best {
  Doubles squared = all_doubles(0), selves = all_doubles(1), numbers = all_doubles(0);

  void take(HalfWords with_numbers, HalfWords with_selves) {
    const Doubles own = doubles_of(with_numbers), by = doubles_of(with_selves), square = own * own;
    const IsMore which = is_more(square * selves, squared * by);
    squared = chosen(which, square, squared);
    selves = chosen(which, by, selves);
    numbers = chosen(which, own, numbers);
  }
};

// The best of all groups by sums of codes with numbers and with themselves.
struct BestOfAll {
  Best first, last;

  void take(Words with_numbers, Words with_selves) {
    first.take(first_half(with_numbers), first_half(with_selves));
    last.take(last_half(with_numbers), last_half(with_selves));
  }
};

// Tries each number of steps from zero for the largest magnitude, upwards and downwards.
template <bool UP, bool DOWN> void try_steps(const Groups& all, int group, int first, int end, BestOfAll& best) {
  for (int steps = first; steps < end; steps++) {
    const int factor = steps * (1 << FRACTION) / STEPS;
    const Words upwards = all_halves(factor), downwards = all_halves(-factor);
    Words up = no_words(), up_selves = up, down = up, down_selves = up;
    for (int i = 0; i < group / 2; i++) {
      const Words t = loaded_words(all.pairs[i]);
      const Words higher = codes_by<UP, DOWN>(t, upwards), lower = codes_by<UP, DOWN>(t, downwards);
      up = plus_products(up, t, higher);
      down = plus_products(down, t, lower);
      up_selves = plus_products(up_selves, higher, higher);
      down_selves = plus_products(down_selves, lower, lower);
    }
    best.take(up, up_selves);
    best.take(down, down_selves);
  }
}

// The best scale of codes is sum(number * code) / sum(code * code), and takes the square of the first sum over the
// second off the squared error: the codes for which that is most are chosen, the first of equal ones. Scales are of the
// dtype; what is too small for any is zero, by a scale of one.
void search(const Groups& all, int group, int dtype, float* scales) {
  BestOfAll best;
  try_steps<false, false>(all, group, FEWEST, UPPER, best);
  try_steps<true, false>(all, group, UPPER, LOWER, best);
  try_steps<true, true>(all, group, LOWER, FURTHEST + 1, best);
  alignas(64) double ratio[LANES];
  store_doubles(ratio, best.first.numbers / best.first.selves);
  store_doubles(ratio + LANES / 2, best.last.numbers / best.last.selves);
  for (int g = 0; g < LANES; g++) {
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

}  // namespace

extern "C" {

// Codes, two in a byte, and scales [rows, groups] of weights [rows, columns], `stride` numbers from row to row. `group`
// inputs share a scale: a multiple of HALVES, MOST at most, that divides the columns. Scales are numbers of the weights'
// dtype. Returns 1 where a weight is not finite.
int native_search_codes(const void* weights, int dtype, long rows, long columns, long stride, int group, uint8_t* codes,
                        float* scales) {
  Groups all{};
  const long groups = columns / group, most = rows * groups;
  for (long k = 0; k < most; k += LANES) {
    const int count = most - k < LANES ? (int)(most - k) : (int)LANES;
    for (int g = 0; g < count; g++) {
      const long row = (k + g) / groups, first = (k + g) % groups * group;
      if (!read_group(all, g, weights, row * stride + first, group, dtype)) return 1;
    }
    float found[LANES];
    search(all, group, dtype, found);
    for (int g = 0; g < count; g++) {
      scales[k + g] = found[g];
      write_codes(all.x[g], group, found[g], codes + (k + g) * group / 2);
    }
  }
  return 0;
}
}
