// Packing of low-rank adapters from the matrices of their files (`adapters.h` says how they lie), and the numbers by which
// a packed one is compared with its matrices. Compiled for AVX2 alone: what is packed has the same bits in every class.
#include <math.h>

#include <algorithm>
#include <vector>

#include "decoder.h"
#include "pool.h"
#include "turned.h"

namespace {

enum { LANES = 16, EIGHT = 8 };

inline int bytes_of(int dtype) { return dtype == holdfast::FLOAT32 ? 4 : 2; }

// Numbers of a row of a matrix. None: zeros.
struct Numbers {
  const char* first = nullptr;
  int dtype = holdfast::FLOAT32;
  long count = 0;

  // The k-th and those after it; zeros behind the last one.
  __m256 eight(long k) const {
    alignas(32) char filled[EIGHT * 4];
    if (k >= count) return _mm256_setzero_ps();
    const char* at = first + k * bytes_of(dtype);
    if (k + EIGHT > count) {
      memset(filled, 0, sizeof filled);
      memcpy(filled, at, (count - k) * bytes_of(dtype));
      at = filled;
    }
    if (dtype == holdfast::FLOAT32) return _mm256_loadu_ps((const float*)at);
    return dtype == holdfast::BFLOAT16 ? widened((const Bf16*)at) : widened((const Half*)at);
  }
};

Numbers row_of_a(const NativeLowRank& part, int rank, long inputs) {
  return {(const char*)part.a + rank * part.a_stride * bytes_of(part.a_dtype), part.a_dtype, inputs};
}
Numbers row_of_b(const NativeLowRank& part, int row) {
  return {(const char*)part.b + (long)row * part.rank * bytes_of(part.b_dtype), part.b_dtype, part.rank};
}

// Rounded to the dtype, each in the lower bits of 32; and back.
template <int DTYPE> NATIVE_INLINE __m256i kept(__m256 v) {
  if (DTYPE == holdfast::BFLOAT16) return to_bf16(v);
  if (DTYPE == holdfast::FLOAT32) return _mm256_castps_si256(v);
  return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
template <int DTYPE> NATIVE_INLINE __m256 rounded_to(__m256 v) {
  const __m256i bits = kept<DTYPE>(v);
  if (DTYPE == holdfast::BFLOAT16) return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  return DTYPE == holdfast::FLOAT32 ? v : _mm256_cvtph_ps(low_words(bits));
}

// out [count][16] = the columns k onwards of eight rows, in the first half of each line.
template <int DTYPE> NATIVE_INLINE void put_columns(const Numbers* rows, long k, int count, char* out) {
  __m256i numbers[EIGHT], columns[EIGHT];
  for (int r = 0; r < EIGHT; r++) numbers[r] = kept<DTYPE>(rows[r].eight(k));
  turn_eight(numbers, columns);
  for (int i = 0; i < count; i++, out += LANES * bytes_of(DTYPE)) {
    if (DTYPE == holdfast::FLOAT32) _mm256_storeu_si256((__m256i*)out, columns[i]);
    else _mm_storeu_si128((__m128i*)out, low_words(columns[i]));
  }
}

// out [length][16] = the columns `first` onwards of sixteen rows.
template <int DTYPE> void put_lines(const Numbers* rows, long first, long length, char* out) {
  for (long k = 0; k < length; k += EIGHT)
    for (int lane = 0; lane < LANES; lane += EIGHT)
      put_columns<DTYPE>(rows + lane, first + k, (int)std::min<long>(EIGHT, length - k),
                         out + (k * LANES + lane) * bytes_of(DTYPE));
}

struct Site {
  const NativeLowRank* parts;
  int num_parts, slices;
  long slice_length, filled_length;
  int blocks;
  const int *part_of, *rows;  // [blocks * 16], -1: none
  const NativeSpan* spans;
};

template <int DTYPE> void pack_a(const Site& s, char* out) {
  std::vector<Numbers> rows;
  for (int p = 0; p < s.num_parts; p++)
    for (int j = 0; j < s.parts[p].rank; j++) rows.push_back(row_of_a(s.parts[p], j, s.slices * s.slice_length));
  rows.resize((rows.size() + LANES - 1) / LANES * LANES);
  for (size_t first = 0; first < rows.size(); first += LANES)
    for (int slice = 0; slice < s.slices; slice++, out += s.filled_length * LANES * bytes_of(DTYPE))
      put_lines<DTYPE>(rows.data() + first, slice * s.slice_length, s.slice_length, out);
}

// One lane of a block whose outputs are of several modules: its ranks begin at line `line`.
template <int DTYPE> void put_lane(const Numbers& row, long line, int lane, char* out) {
  for (long j = 0; j < row.count; j += EIGHT) {
    alignas(32) int words[EIGHT];
    _mm256_store_si256((__m256i*)words, kept<DTYPE>(row.eight(j)));
    for (int i = 0; i < EIGHT && j + i < row.count; i++)
      memcpy(out + ((line + j + i) * LANES + lane) * bytes_of(DTYPE), words + i, bytes_of(DTYPE));
  }
}

template <int DTYPE> void pack_b(const Site& s, char* out) {
  std::vector<int> firsts(s.num_parts);
  for (int p = 1; p < s.num_parts; p++) firsts[p] = firsts[p - 1] + s.parts[p - 1].rank;
  for (int block = 0; block < s.blocks; block++) {
    const NativeSpan& span = s.spans[block];
    char* to = out + span.place * bytes_of(DTYPE);
    Numbers rows[LANES];
    long lines[LANES];
    bool is_whole = true;
    for (int lane = 0; lane < LANES; lane++) {
      const int part = s.part_of[block * LANES + lane];
      if (part < 0 || !s.parts[part].rank) continue;
      rows[lane] = row_of_b(s.parts[part], s.rows[block * LANES + lane]);
      lines[lane] = firsts[part] - span.first;
      is_whole &= rows[lane].count == span.end - span.first;
    }
    if (is_whole) put_lines<DTYPE>(rows, 0, span.end - span.first, to);
    for (int lane = 0; lane < LANES && !is_whole; lane++)
      if (rows[lane].count) put_lane<DTYPE>(rows[lane], lines[lane], lane, to);
  }
}

float sum_of_eight(__m256 v) {
  alignas(32) float sums[EIGHT];
  _mm256_store_ps(sums, v);
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

// The larger of both; not a number, where one is none.
NATIVE_INLINE float larger_of(float a, float b) { return b > a || b != b ? b : a; }

// What the matrices of one module add to outputs of fixed inputs x [filled up], rounded as they are packed.
template <int DTYPE> struct Expected {
  std::vector<float> inner;  // [ranks, filled up]: scale A x
  float largest_inner = 0;   // usual size of one of them: of as large numbers that do not cancel each other
  __m256 largest_b = _mm256_setzero_ps();

  Expected(const NativeLowRank& part, const std::vector<float>& x, long inputs) : inner(part.rank + EIGHT) {
    __m256 of_x = _mm256_setzero_ps();
    for (long k = 0; k < inputs; k += EIGHT) {
      const __m256 some = _mm256_loadu_ps(x.data() + k);
      of_x = _mm256_fmadd_ps(some, some, of_x);
    }
    const float size = sqrtf(sum_of_eight(of_x) / (float)inputs) * fabsf(part.scale);
    for (int j = 0; j < part.rank; j++) {
      const Numbers row = row_of_a(part, j, inputs);
      __m256 sum = _mm256_setzero_ps(), squares = sum;
      for (long k = 0; k < inputs; k += EIGHT) {
        const __m256 a = rounded_to<DTYPE>(row.eight(k));
        sum = _mm256_fmadd_ps(a, _mm256_loadu_ps(x.data() + k), sum), squares = _mm256_fmadd_ps(a, a, squares);
      }
      inner[j] = sum_of_eight(sum) * part.scale;
      largest_inner = larger_of(largest_inner, sqrtf(sum_of_eight(squares)) * size);
    }
  }
  float output(const NativeLowRank& part, int row) {
    const Numbers of_b = row_of_b(part, row);
    __m256 sum = _mm256_setzero_ps();
    for (long j = 0; j < part.rank; j += EIGHT) {
      const __m256 b = rounded_to<DTYPE>(of_b.eight(j));
      sum = _mm256_fmadd_ps(b, _mm256_loadu_ps(inner.data() + j), sum);
      largest_b = _mm256_max_ps(largest_b, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), b));
    }
    return sum_of_eight(sum);
  }
  float usual() const {
    alignas(32) float each[EIGHT];
    _mm256_store_ps(each, largest_b);
    return largest_inner * *std::max_element(each, each + EIGHT);
  }
};

template <int DTYPE>
void compare(const NativeLowRank* parts, int num_parts, const float* x, long inputs, const long* part_of,
             const long* rows, const long* place_of, long outputs, const float* found, float* differences) {
  std::vector<float> filled(inputs + EIGHT);
  std::copy(x, x + inputs, filled.begin());
  std::vector<Expected<DTYPE>> expected;
  for (int p = 0; p < num_parts; p++) expected.emplace_back(parts[p], filled, inputs);
  std::fill(differences, differences + 3 * num_parts, 0.0f);
  for (long i = 0; i < outputs; i++) {
    const long part = part_of[i];
    if (!parts[part].rank) continue;
    const float sum = expected[part].output(parts[part], (int)rows[i]);
    float* own = differences + 3 * part;
    own[0] = larger_of(own[0], fabsf(found[place_of[i]] - sum)), own[1] = larger_of(own[1], fabsf(sum));
  }
  for (int p = 0; p < num_parts; p++) differences[3 * p + 2] = expected[p].usual();
}

// What `fn` says of a dtype, which it has as a type.
template <class Fn> int for_dtype(int dtype, Fn&& fn) {
  if (dtype == holdfast::BFLOAT16) return fn(std::integral_constant<int, holdfast::BFLOAT16>());
  if (dtype == holdfast::FLOAT16) return fn(std::integral_constant<int, holdfast::FLOAT16>());
  return fn(std::integral_constant<int, holdfast::FLOAT32>());
}

}  // namespace

// a [ranks / 16][slices][filled_length][16], b as `spans` say: of parts [num_parts], of which each has `rank` 0 where there
// is none. `part_of` and `rows` say which output of which part a packed one is; -1: none. a and b are zeros before.
// kDone or kNoMemory.
extern "C" int native_pack_adapted(const NativeLowRank* parts, int num_parts, int dtype, int slices, long slice_length,
                                   long filled_length, int blocks, const int* part_of, const int* rows,
                                   const NativeSpan* spans, void* a, void* b) {
  const Site site = {parts, num_parts, slices, slice_length, filled_length, blocks, part_of, rows, spans};
  auto pack = [&](auto of_dtype) {
    pack_a<of_dtype()>(site, (char*)a), pack_b<of_dtype()>(site, (char*)b);
    return holdfast::kDone;
  };
  return holdfast::prepared([&] { return for_dtype(dtype, pack); });
}

// differences [num_parts][3]: of each part the largest difference between what is added to its outputs, found [place_of of
// an output], and scale B A x; the largest such sum; and the usual size of one. `part_of`, `rows`: [outputs]. Outcomes as
// above.
extern "C" int native_compare_added(const NativeLowRank* parts, int num_parts, int dtype, const float* x, long inputs,
                                    const long* part_of, const long* rows, const long* place_of, long outputs,
                                    const float* found, float* differences) {
  auto compare_all = [&](auto of_dtype) {
    compare<of_dtype()>(parts, num_parts, x, inputs, part_of, rows, place_of, outputs, found, differences);
    return holdfast::kDone;
  };
  return holdfast::prepared([&] { return for_dtype(dtype, compare_all); });
}
