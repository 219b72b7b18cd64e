// Tile registers: AMX's bf16 products, or the same in software where a machine has none.
// A product is, in the order that Intel documents for TDPBF16PS: two sums by FMA from +0, over even and over odd k, added
// to each other and then to the accumulator. Which tiles hold what is decided in `linear.h` and `attention.h`.
#pragma once
#include "lanes.h"

namespace {

#if defined(NATIVE_AMX)

struct Tiles {
  int shape = 0;
};

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
};

// Not the intrinsic: GCC 12 tells its optimizer that 8 of the 64 bytes are read, and drops the stores to the others.
NATIVE_INLINE void load_config(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
NATIVE_INLINE void release_tiles(Tiles& tiles) {
  asm volatile("tilerelease");
  tiles.shape = 0;
}
template <int T> NATIVE_INLINE void tile_zero(Tiles&) { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T> NATIVE_INLINE void tile_load(Tiles&, const void* p, long stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T> NATIVE_INLINE void tile_store(Tiles&, float* p, long stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B> NATIVE_INLINE void tile_product(Tiles&) {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#elif defined(NATIVE_SOFTWARE_TILES)

struct TileConfig {
  uint8_t palette, start_row;
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
};
struct Tiles {
  int shape = 0;
  TileConfig config;
  alignas(64) unsigned char bytes[8][16][64];
};

NATIVE_INLINE void release_tiles(Tiles& tiles) { tiles.shape = 0; }
template <int T> void tile_zero(Tiles& t) { memset(t.bytes[T], 0, sizeof t.bytes[T]); }
template <int T> void tile_load(Tiles& t, const void* p, long stride) {
  memset(t.bytes[T], 0, sizeof t.bytes[T]);
  for (int r = 0; r < t.config.rows[T]; r++)
    memcpy(t.bytes[T][r], (const char*)p + r * stride, t.config.bytes_per_row[T]);
}
template <int T> void tile_store(Tiles& t, float* p, long stride) {
  for (int r = 0; r < t.config.rows[T]; r++) memcpy((char*)p + r * stride, t.bytes[T][r], t.config.bytes_per_row[T]);
}
template <int C, int A, int B> void tile_product(Tiles& t) {
  int pairs = t.config.bytes_per_row[A] / 4;
  for (int row = 0; row < t.config.rows[C]; row++)
    for (int col = 0; col < 16; col += WIDTH) {
      Wide even = wide_zero(), odd = wide_zero();
      for (int pair = 0; pair < pairs; pair++) {
        uint32_t both;
        memcpy(&both, t.bytes[A][row] + pair * 4, 4);
        uint32_t low = both << 16, high = both & 0xffff0000u;
        float a[2];
        memcpy(a, &low, 4), memcpy(a + 1, &high, 4);
        const Bf16* b = (const Bf16*)t.bytes[B][pair] + col * 2;
        even = wide_fma(wide_all(a), even_of(b), even);
        odd = wide_fma(wide_all(a + 1), odd_of(b), odd);
      }
      float* c = (float*)t.bytes[C][row] + col;
      wide_store(c, wide_add(wide_load(c), wide_add(even, odd)));
    }
}

#else

struct Tiles {};
NATIVE_INLINE void release_tiles(Tiles&) {}

#endif

#if defined(NATIVE_AMX) || defined(NATIVE_SOFTWARE_TILES)
#define NATIVE_TILES 1

// Accumulators 0 to 3, rows 4 and 5, weights (or keys, or values) 6 and 7. Tiles 0, 1 and 4 have the first rows, 2, 3 and
// 5 the others. Rows of a tile that nobody asked for cost nothing, another shape does.
NATIVE_INLINE void shape_tiles(Tiles& tiles, int rows, int more_rows) {
  int shape = 1 + rows + 32 * more_rows;
  if (tiles.shape == shape) return;
  tiles.shape = shape;
  TileConfig config;
  memset(&config, 0, sizeof config);
  config.palette = 1;
  for (int i = 0; i < 8; i++) config.bytes_per_row[i] = 64, config.rows[i] = 16;
  for (int i : {0, 1, 4}) config.rows[i] = rows;
  for (int i : {2, 3, 5}) config.rows[i] = more_rows;
#if defined(NATIVE_AMX)
  load_config(config);
#else
  tiles.config = config;
#endif
}
#endif

}  // namespace
