// Packing of low-rank adapters from the matrices of their files (`adapters.h` says how they lie), each linear with its proof
// (`adapter_proof.h`) while a cache has it. Compiled for AVX2 alone: what is packed has the same bits in every class.
#include <vector>

#include "adapter_numbers.h"
#include "adapter_proof.h"
#include "decoder.h"
#include "pool.h"
#include "turned.h"

namespace {

enum { AHEAD_BYTES = 512 };

// out [count][16] = the columns k onwards of sixteen rows.
template <int DTYPE> NATIVE_INLINE void put_columns(const Numbers* rows, long k, int count, char* out) {
  __m256i numbers[LANES], columns[LANES];
  if (DTYPE != holdfast::FLOAT32) {
    NATIVE_UNROLL
    for (int r = 0; r < LANES; r++) numbers[r] = sixteen<DTYPE>(rows[r], k);
    turn_sixteen(numbers, columns);
    NATIVE_UNROLL
    for (int i = 0; i < LANES; i++)
      if (i < count) _mm256_storeu_si256((__m256i*)out + i, columns[i]);
    return;
  }
  for (int first = 0; first < count; first += EIGHT)
    for (int lane = 0; lane < LANES; lane += EIGHT) {
      for (int r = 0; r < EIGHT; r++) numbers[r] = _mm256_castps_si256(rows[lane + r].eight(k + first));
      turn_eight(numbers, columns);
      for (int i = 0; i < std::min<int>(EIGHT, count - first); i++)
        _mm256_storeu_si256((__m256i*)(out + ((first + i) * LANES + lane) * 4), columns[i]);
    }
}

// out [length][16] = the columns `first` onwards of sixteen rows.
template <int DTYPE> void put_lines(const Numbers* rows, long first, long length, char* out) {
  for (long k = 0; k < length; k += LANES) {
    for (int r = 0; r < LANES && k % 32 == 0; r++)  // as many streams as rows: more than the CPU follows by itself
      _mm_prefetch(rows[r].first + (first + k) * bytes_of(rows[r].dtype) + AHEAD_BYTES, _MM_HINT_T0);
    put_columns<DTYPE>(rows, first + k, (int)std::min<long>(LANES, length - k), out + k * LANES * bytes_of(DTYPE));
  }
}

template <int DTYPE> void pack_a(const NativeAdaptedSite& s, char* out) {
  const long line = LANES * bytes_of(DTYPE), inputs = s.slices * s.slice_length;
  std::vector<Numbers> rows;
  for (int p = 0; p < s.num_parts; p++)
    for (int j = 0; j < s.parts[p].rank; j++) rows.push_back(row_of_a(s.parts[p], j, inputs, s.columns));
  rows.resize((rows.size() + LANES - 1) / LANES * LANES);
  for (size_t first = 0; first < rows.size(); first += LANES)
    for (int slice = 0; slice < s.slices; slice++, out += s.filled_length * line) {
      put_lines<DTYPE>(rows.data() + first, slice * s.slice_length, s.slice_length, out);
      memset(out + s.slice_length * line, 0, (s.filled_length - s.slice_length) * line);
    }
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

template <int DTYPE> void pack_b(const NativeAdaptedSite& s, const NativeSpan* spans, char* out) {
  std::vector<int> firsts(s.num_parts);
  for (int p = 1; p < s.num_parts; p++) firsts[p] = firsts[p - 1] + s.parts[p - 1].rank;
  for (int block = 0; block < s.blocks; block++) {
    const NativeSpan& span = spans[block];
    const long length = span.end - span.first;
    char* to = out + span.place * bytes_of(DTYPE);
    Numbers rows[LANES];
    long lines[LANES];
    bool is_whole = true;
    for (int lane = 0; lane < LANES; lane++) {
      const int part = s.part_of[block * LANES + lane];
      if (part < 0 || !s.parts[part].rank) continue;
      rows[lane] = row_of_b(s.parts[part], s.rows[block * LANES + lane]);
      lines[lane] = firsts[part] - span.first;
      is_whole &= rows[lane].count == length;
    }
    if (is_whole) put_lines<DTYPE>(rows, 0, length, to);
    else memset(to, 0, length * LANES * bytes_of(DTYPE));
    for (int lane = 0; lane < LANES && !is_whole; lane++)
      if (rows[lane].count) put_lane<DTYPE>(rows[lane], lines[lane], lane, to);
  }
}

}  // namespace

// Packs and proves the matrices of some of the linears, [count]; not `packs`: what is packed already is proved once more.
// `linears`, of all: where they go, a [ranks / 16][slices][filled_length][16] and b as its spans say, whatever is there;
// scales are there already. differences: [parts of these linears][3], as `prove` says. On the calling thread. kDone or
// kNoMemory.
extern "C" int native_load_adapter(const NativeAdaptedSite* sites, const NativeAdapted* linears, int count, int dtype,
                                   int packs, float* differences) {
  auto load = [&](auto of_dtype) {
    for (int i = 0; i < count; differences += 3 * sites[i++].num_parts) {
      const NativeAdapted& adapted = linears[sites[i].number];
      if (packs) pack_a<of_dtype()>(sites[i], (char*)adapted.a);
      if (packs) pack_b<of_dtype()>(sites[i], adapted.spans, (char*)adapted.b);
      prove<of_dtype()>(sites[i], adapted, differences);
    }
    return holdfast::kDone;
  };
  return holdfast::prepared([&] { return for_dtype(dtype, load); });
}
