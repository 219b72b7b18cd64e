// Packing of low-rank adapters from the matrices of their files (`adapters.h` says how they lie), each linear with its proof
// (`adapter_proof.h`) while a cache has it. Compiled for AVX2 alone: what is packed has the same bits in every class.
#include <vector>

#include "adapter_numbers.h"
#include "adapter_proof.h"
#include "decoder.h"
#include "pool.h"
#include "turned.h"

namespace {

// Of A, whose rows lie apart, and of B, whose rows follow each other.
enum { AHEAD_BYTES_OF_A = 512, AHEAD_BYTES_OF_B = 2048 };

// out [count][16] = the columns k onwards of sixteen rows.
template <int DTYPE, class Row> NATIVE_INLINE void put_columns(const Row* rows, long k, int count, char* out) {
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
template <int DTYPE, int AHEAD_BYTES, class Row> void put_lines(const Row* rows, long first, long length, char* out) {
  const int bytes = rows[0].bytes();
  for (long k = 0; k < length; k += LANES) {
    for (int r = 0; r < LANES && k * bytes % 64 == 0; r++)  // more streams than the CPU follows by itself
      _mm_prefetch(rows[r].first + (first + k) * bytes + AHEAD_BYTES, _MM_HINT_T0);
    put_columns<DTYPE>(rows, first + k, (int)std::min<long>(LANES, length - k), out + k * LANES * bytes_of(DTYPE));
  }
}

// Whether sixteen rows are runs of one dtype.
bool are_runs(const Numbers* rows) {
  return std::all_of(rows, rows + LANES,
                     [&](const Numbers& row) { return row.count && row.is_run() && row.dtype == rows->dtype; });
}

template <int DTYPE> void pack_a(const NativeAdaptedSite& s, char* out) {
  const long line = LANES * bytes_of(DTYPE), inputs = s.slices * s.slice_length;
  std::vector<Numbers> all;
  for (int p = 0; p < s.num_parts; p++)
    for (int j = 0; j < s.parts[p].rank; j++) all.push_back(row_of_a(s.parts[p], j, inputs, s.columns));
  all.resize((all.size() + LANES - 1) / LANES * LANES);
  for (const Numbers* some = all.data(); some != all.data() + all.size(); some += LANES)
    with_rows(some->dtype, s.slice_length % LANES == 0 && are_runs(some), [&](auto of) {
      typename decltype(of)::Type rows[LANES];
      for (int r = 0; r < LANES; r++) rows[r] = typename decltype(of)::Type(some[r]);
      for (int slice = 0; slice < s.slices; slice++, out += s.filled_length * line) {
        put_lines<DTYPE, AHEAD_BYTES_OF_A>(rows, slice * s.slice_length, s.slice_length, out);
        memset(out + s.slice_length * line, 0, (s.filled_length - s.slice_length) * line);
      }
    });
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

// A block whose outputs are of several modules, or padding.
template <int DTYPE>
void put_mixed(const NativeAdaptedSite& s, const int* firsts, int block, const NativeSpan& span, char* out) {
  memset(out, 0, (span.end - span.first) * LANES * bytes_of(DTYPE));
  for (int lane = 0; lane < LANES; lane++) {
    const int part = s.part_of[block * LANES + lane];
    if (part < 0 || !s.parts[part].rank) continue;
    const Numbers row = row_of_b(s.parts[part], s.rows[block * LANES + lane]);
    put_lane<DTYPE>(row, firsts[part] - span.first, lane, out);
  }
}

template <int DTYPE> void pack_b(const NativeAdaptedSite& s, const NativeSpan* spans, char* out) {
  std::vector<int> firsts(s.num_parts);
  for (int p = 1; p < s.num_parts; p++) firsts[p] = firsts[p - 1] + s.parts[p - 1].rank;
  for (int block = 0; block < s.blocks; block++) {
    const int *of_lanes = s.part_of + block * LANES, *outputs = s.rows + block * LANES;
    char* to = out + spans[block].place * bytes_of(DTYPE);
    if (of_lanes[0] < 0 || std::any_of(of_lanes, of_lanes + LANES, [&](int part) { return part != of_lanes[0]; })) {
      put_mixed<DTYPE>(s, firsts.data(), block, spans[block], to);
      continue;
    }
    const NativeLowRank& part = s.parts[of_lanes[0]];
    with_rows(part.b_dtype, part.b_step == 1 && part.rank % EIGHT == 0, [&](auto of) {
      typename decltype(of)::Type rows[LANES];
      for (int r = 0; r < LANES; r++) rows[r] = typename decltype(of)::Type(row_of_b(part, outputs[r]));
      put_lines<DTYPE, AHEAD_BYTES_OF_B>(rows, 0, part.rank, to);
    });
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
