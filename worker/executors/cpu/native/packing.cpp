// Packing of weights into tiles, once at load: see `linear.h` for the layout. Compiled for any x86-64, and once more for the
// classes whose tiles of bf16 lie in another order (`NATIVE_PAIRS`).
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "decoder.h"
#include "pool.h"
#include "sampler.h"
#include "tile_order.h"

namespace {

struct Source {
  const char* const* rows;   // [outputs]: where each row of inputs begins, or null for a row of zeros
  long inputs;               // elements of a row
  int slices, slice_length;  // real inputs of a slice
  int slice_tiles, bytes;    // k tiles of a padded slice, bytes of an element
  int dtype;
};

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

// A tile: inputs [k, k + 32) of a slice for outputs [n, n + 16).
void pack_tile(const Source& s, const Places& places, long slice, int tile, long n, char* out) {
  int first = tile * 32, end = s.slice_length - first < 32 ? s.slice_length - first : 32;
  memset(out, 0, 512 * s.bytes);
  for (int c = 0; c < 16; c++) {
    const char* row = s.rows[n + c];
    if (!row) continue;
    row += (slice * s.slice_length + first) * s.bytes;
    for (int k = 0; k < end; k++) {
      int at = places.at[k][c];
      if (s.bytes == 2) memcpy(out + at * 2, row + k * 2, 2);
      else memcpy(out + at * 4, row + k * 4, 4);
    }
  }
}

struct Job {
  Source source;
  long panels;
  char* out;
};

void pack_all(const void* argument, holdfast::Run& run) {
  const Job job = *(const Job*)argument;
  const Source& s = job.source;
  const Places places(s.dtype);
  long tiles = (long)s.slices * s.slice_tiles;
  holdfast::tasks(run, (int)job.panels, [&](int panel) {  // 32 outputs
    char* out = job.out + panel * tiles * 1024 * s.bytes;
    for (long t = 0; t < tiles; t++)
      for (int half = 0; half < 2; half++, out += 512 * s.bytes)
        pack_tile(s, places, t / s.slice_tiles, (int)(t % s.slice_tiles), panel * 32L + half * 16, out);
  });
}

}  // namespace

extern "C" int native_pack(holdfast::Pool* pool, const char* const* rows, long outputs, int slices, int slice_length,
                           int slice_tiles, int dtype, char* out) {
  int bytes = dtype == holdfast::FLOAT32 ? 4 : 2;
  Job job = {{rows, (long)slices * slice_length, slices, slice_length, slice_tiles, bytes, dtype}, outputs / 32, out};
  return holdfast::run(pool, pack_all, &job);
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
      sizeof(NativeUnits),         sizeof(NativePanel),    sizeof(NativeLinear),     sizeof(NativeNorm),
      sizeof(NativeMlp),           sizeof(NativeExperts),  sizeof(NativeRotary),     sizeof(NativeShortConv),
      sizeof(NativeRecurrence),    sizeof(NativeLatent),   sizeof(NativeLayerInput), sizeof(NativeTokenInputs),
      sizeof(NativeLayer),         sizeof(NativeExchange), sizeof(NativeModel),      sizeof(NativeStep),
      sizeof(NativeEdits),         sizeof(NativeDraw),     sizeof(NativeDrawn),      sizeof(NativeAttention),
      sizeof(NativeAttentionRows), sizeof(NativeSpan),     sizeof(NativeAdapted),    sizeof(NativeAdapter)};
  memcpy(out, sizes, sizeof sizes);
}
