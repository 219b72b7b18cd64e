// Packing of codes of E4M3 into panels of `coded_order.h`, once at load. Compiled for AVX2, and
// once more for the classes whose tiles of bf16 lie in another order (`NATIVE_PAIRS`).
#include <immintrin.h>
#include <string.h>

#include <atomic>

#include "coded_order.h"
#include "pool.h"

namespace {

enum { ROWS = 16, NOT_FINITE = 2 };

struct CodeJob {
  const uint8_t* const* rows;  // [outputs]: where each row of codes begins, or null for a row of zeros
  const float* scales;         // [outputs][runs]
  int k_tiles, run;
  long panels;
  char* out;
  std::atomic<int>* found;
};

// Sixteen inputs of sixteen rows change places with them.
void turn(__m128i* r) {
  for (int round = 0; round < 4; round++) {
    __m128i t[ROWS];
    for (int i = 0; i < ROWS / 2; i++) {
      t[2 * i] = _mm_unpacklo_epi8(r[i], r[i + ROWS / 2]);
      t[2 * i + 1] = _mm_unpackhi_epi8(r[i], r[i + ROWS / 2]);
    }
    memcpy(r, t, sizeof t);
  }
}

// A tile of 16 outputs, inputs 32 `k` onwards. Returns NOT_FINITE where a code is a NaN, else 0.
int pack_coded_tile(const uint8_t* const* rows, int k, uint8_t* out) {
  const __m128i nan = _mm_set1_epi8(0x7f);
  __m128i odd = _mm_setzero_si128(), codes[K_TILE];
  for (int half = 0; half < K_TILE; half += ROWS) {
    for (int n = 0; n < ROWS; n++) {
      const long at = (long)k * K_TILE + half;
      codes[half + n] = rows[n] ? _mm_loadu_si128((const __m128i*)(rows[n] + at)) : _mm_setzero_si128();
      odd = _mm_or_si128(odd, _mm_cmpeq_epi8(_mm_and_si128(codes[half + n], nan), nan));
    }
    turn(codes + half);
  }
  for (int line = 0; line < LINES_OF_TILE; line++, out += LINE_OF_TILE) {
    const __m128i first = codes[first_input(line)], second = codes[second_input(line)];
    _mm_storeu_si128((__m128i*)out, _mm_unpacklo_epi8(first, second));
    _mm_storeu_si128((__m128i*)(out + ROWS), _mm_unpackhi_epi8(first, second));
  }
  return _mm_testz_si128(odd, odd) ? 0 : NOT_FINITE;
}

int pack_coded_panel(const CodeJob& job, long n, char* out) {
  const CodedPanel panel = {out, job.k_tiles, job.run};
  for (int i = 0; i < panel.runs(); i++)
    for (int c = 0; c < CODED_OUTPUTS; c++)
      ((float*)panel.scales(i * job.run))[c] = job.scales[(n + c) * panel.runs() + i] * SCALE_FACTOR;
  int found = 0;
  for (int i = 0; i < 2 * job.k_tiles; i++)
    found |= pack_coded_tile(job.rows + n + i % 2 * ROWS, i / 2, (uint8_t*)panel.tile(i));
  return found;
}

void pack_all_codes(const void* argument, holdfast::Run& run) {
  const CodeJob job = *(const CodeJob*)argument;
  const long bytes = CodedPanel{nullptr, job.k_tiles, job.run}.bytes();
  holdfast::tasks(run, (int)job.panels, [&](int i) {
    if (const int found = pack_coded_panel(job, i * (long)CODED_OUTPUTS, job.out + i * bytes))
      job.found->fetch_or(found);
  });
}

}  // namespace

// Bytes of a panel of so many k tiles, of which `run` share scales.
extern "C" long native_coded_bytes(int k_tiles, int run) { return CodedPanel{nullptr, k_tiles, run}.bytes(); }

// Panels of rows of codes, `scales` [outputs][runs]. Returns NOT_FINITE where a code is a NaN; below 0 what `holdfast::run`
// says; else 0.
extern "C" int native_pack_codes(holdfast::Pool* pool, const uint8_t* const* rows, const float* scales, long outputs,
                                 int k_tiles, int run, char* out) {
  std::atomic<int> found{0};
  CodeJob job = {rows, scales, k_tiles, run, outputs / CODED_OUTPUTS, out, &found};
  const int outcome = holdfast::run(pool, pack_all_codes, &job);
  return outcome ? outcome : found.load();
}
