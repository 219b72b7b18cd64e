// Packing of weights into tiles, once at load, as they are or compact: see `linear.h` for the layout. Compiled for AVX2, and once more for the
// classes whose tiles of bf16 lie in another order (`NATIVE_PAIRS`).
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "compact_write.h"
#include "decoder.h"
#include "pool.h"
#include "sampler.h"
#include "tile_order.h"

namespace {

struct Source {
  const char* const* rows;   // [outputs]: where each row of inputs begins, or null for a row of zeros
  int slices, slice_length;  // real inputs of a slice
  int slice_tiles, bytes;    // k tiles of a padded slice, bytes of an element
  long tiles() const { return (long)slices * slice_tiles; }
};

enum { ROWS = 16, PANEL = 2 * ROWS, MISFIT = 1, NOT_FINITE = 2 };

int place(int dtype, int k, int n) {
  if (dtype == holdfast::FLOAT32) return in_lines(k, n);
#ifdef NATIVE_PAIRS
  if (dtype == holdfast::BFLOAT16) return in_fours(k, n);
#endif
  return in_pairs(k, n);
}

// In a tile: of each input and output.
struct Places {
  short at[K_TILE][16];
  explicit Places(int dtype) {
    for (int k = 0; k < K_TILE; k++)
      for (int n = 0; n < 16; n++) at[k][n] = (short)place(dtype, k, n);
  }
};

// The k tile `tile` of 16 rows, from the `n`-th on: where they lie, or filled up with zeros.
struct TileRows {
  const char* first[ROWS];
  char filled[ROWS][K_TILE * 4];
  TileRows(const Source& s, long tile, long n) {
    const int from = (int)(tile % s.slice_tiles) * K_TILE;
    const int count = s.slice_length - from < K_TILE ? s.slice_length - from : (int)K_TILE;
    const long at = (tile / s.slice_tiles * s.slice_length + from) * s.bytes;
    for (int c = 0; c < ROWS; c++) {
      const char* row = s.rows[n + c];
      first[c] = row && count == K_TILE ? row + at : filled[c];
      if (first[c] != filled[c]) continue;
      memset(filled[c], 0, K_TILE * s.bytes);
      if (row) memcpy(filled[c], row + at, count * s.bytes);
    }
  }
};

// Lines and columns of 8 by 8 words of 32 bits change places.
void turn(__m256i (&r)[8]) {
  __m256i t[8], u[8];
  for (int i = 0; i < 4; i++)
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]),
          t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      u[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + j + 2]);
      u[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
  }
}

// Two pairs of inputs as they are in `in_fours`: even ones and odd ones.
void order_fours(__m256i& first, __m256i& second) {
  const __m256i low = _mm256_set1_epi32(0xffff), a = first, b = second;
  first = _mm256_or_si256(_mm256_slli_epi32(a, 16), _mm256_and_si256(b, low));
  second = _mm256_or_si256(_mm256_andnot_si256(low, a), _mm256_srli_epi32(b, 16));
}

// Whether any number is not finite: all bits of an exponent are set.
template <int DTYPE> __m256i not_finite(__m256i numbers) {
  const __m256i exponent = _mm256_set1_epi32(DTYPE == holdfast::FLOAT32    ? 0x7f800000
                                             : DTYPE == holdfast::BFLOAT16 ? 0x7f807f80
                                                                           : 0x7c007c00);
  const __m256i own = _mm256_and_si256(numbers, exponent);
  return DTYPE == holdfast::FLOAT32 ? _mm256_cmpeq_epi32(own, exponent) : _mm256_cmpeq_epi16(own, exponent);
}

// A tile of 16 rows. Returns NOT_FINITE where a number is not finite, else 0.
template <int DTYPE> int pack_tile(const TileRows& rows, char* out) {
  const int LINES = DTYPE == holdfast::FLOAT32 ? 32 : 16;  // words of 32 bits of a row
  __m256i odd = _mm256_setzero_si256();
  for (int half = 0; half < 2; half++)
    for (int line = 0; line < LINES; line += 8) {
      __m256i words[8];
      for (int i = 0; i < 8; i++) {
        words[i] = _mm256_loadu_si256((const __m256i*)(rows.first[half * 8 + i] + line * 4));
        odd = _mm256_or_si256(odd, not_finite<DTYPE>(words[i]));
      }
      turn(words);
#ifdef NATIVE_PAIRS
      for (int i = 0; DTYPE == holdfast::BFLOAT16 && i < 8; i += 2) order_fours(words[i], words[i + 1]);
#endif
      for (int i = 0; i < 8; i++) _mm256_storeu_si256((__m256i*)(out + (line + i) * 64 + half * 32), words[i]);
    }
  return _mm256_testz_si256(odd, odd) ? 0 : NOT_FINITE;
}

template <int DTYPE> int pack_panel(const Source& s, long n, char* out) {
  int found = 0;
  for (long t = 0; t < s.tiles(); t++)
    for (int half = 0; half < 2; half++, out += 512 * s.bytes)
      found |= pack_tile<DTYPE>(TileRows(s, t, n + half * ROWS), out);
  return found;
}

ExponentCounts exponents_of(const Source& s, long n) {
  ExponentCounts counts;
  const long length = (long)s.slices * s.slice_length;
  long zeros = PANEL * s.tiles() * K_TILE;
  for (int c = 0; c < PANEL; c++)
    if (const char* row = s.rows[n + c]) counts.add(row, length), zeros -= length;
  counts.counts[0][0] += (uint32_t)zeros;
  return counts;
}

// A panel of bfloat16 as in `compact_order.h`, tile by tile: no panel is written as it is.
int pack_compact(const Source& s, long n, char* out) {
  PanelWriter writer(out, (int)s.tiles() * 2, exponents_of(s, n));
  alignas(32) uint16_t words[TILE];
  int found = 0;
  for (long t = 0; t < s.tiles(); t++)
    for (int half = 0; half < 2; half++) {
      found |= pack_tile<holdfast::BFLOAT16>(TileRows(s, t, n + half * ROWS), (char*)words);
      if (!writer.add(words)) return found | MISFIT;
    }
  return found;
}

struct Job {
  Source source;
  int dtype;
  long panels, panel_bytes;
  char* out;
  std::atomic<int>* found;
};

void pack_all(const void* argument, holdfast::Run& run) {
  const Job job = *(const Job*)argument;
  const Source& s = job.source;
  const long panel_bytes = job.panel_bytes ? job.panel_bytes : s.tiles() * 2 * TILE * s.bytes;
  holdfast::tasks(run, (int)job.panels, [&](int i) {
    char* out = job.out + i * panel_bytes;
    const long n = i * (long)PANEL;
    const int found = job.panel_bytes                   ? pack_compact(s, n, out)
                      : job.dtype == holdfast::FLOAT32  ? pack_panel<holdfast::FLOAT32>(s, n, out)
                      : job.dtype == holdfast::BFLOAT16 ? pack_panel<holdfast::BFLOAT16>(s, n, out)
                                                        : pack_panel<holdfast::FLOAT16>(s, n, out);
    if (found) job.found->fetch_or(found);
  });
}

}  // namespace

// Tiles of rows: as they are, or, of bfloat16, compact panels of `panel_bytes` each. Returns MISFIT where a panel has too
// many rare numbers to be compact, and `out` is of no use; NOT_FINITE where a number is a NaN or an infinity; both; or
// what `holdfast::run` says, below 0.
extern "C" int native_pack(holdfast::Pool* pool, const char* const* rows, long outputs, int slices, int slice_length,
                           int slice_tiles, int dtype, long panel_bytes, char* out) {
  std::atomic<int> found{0};
  const int bytes = dtype == holdfast::FLOAT32 ? 4 : 2;
  Job job = {{rows, slices, slice_length, slice_tiles, bytes}, dtype, outputs / PANEL, panel_bytes, out, &found};
  const int outcome = holdfast::run(pool, pack_all, &job);
  return outcome ? outcome : found.load();
}

// Where input k of output n lies in a tile: out [32][16].
extern "C" void native_places(int dtype, short* out) {
  const Places places(dtype);
  memcpy(out, places.at, sizeof places.at);
}

// Asks the system to let this process use AMX's tiles; 0: they may be used.
extern "C" int native_allow_tiles() {
  const long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return (int)syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}

extern "C" const char* native_digest() { return NATIVE_DIGEST; }

// Sizes of the structures, in the order of `structures.py`.
extern "C" void native_sizes(int* out) {
  const int sizes[] = {
      sizeof(NativeUnits),         sizeof(NativePanel),      sizeof(NativeLinear),     sizeof(NativeNorm),
      sizeof(NativeMlp),           sizeof(NativeExperts),    sizeof(NativeRotary),     sizeof(NativeShortConv),
      sizeof(NativeRecurrence),    sizeof(NativeLatent),     sizeof(NativeLayerInput), sizeof(NativeTokenInputs),
      sizeof(NativeLayer),         sizeof(NativeExchange),   sizeof(NativeModel),      sizeof(NativeStep),
      sizeof(NativeEdits),         sizeof(NativeDraw),       sizeof(NativeDrawn),      sizeof(NativeAttention),
      sizeof(NativeAttentionRows), sizeof(NativeSpan),       sizeof(NativeAdapted),    sizeof(NativeAdapter),
      sizeof(NativeLowRank),       sizeof(NativeAdaptedSite)};
  memcpy(out, sizes, sizeof sizes);
}
