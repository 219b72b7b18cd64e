// Products of few rows with compact weights, which are read into registers and never stored as they were; and pieces of
// such weights in float32 for more rows, where a register holds 8 outputs. Other products of more rows read them into
// the first cache (`compact_stream.h`, `linear.h`).
#pragma once
#include "compact.h"
#include "fma.h"

namespace {

// Up to so many of factors of a kind; and how many k tiles weights are fetched ahead, for these rows and for more.
template <class F>
constexpr int most_in_registers = FactorOf<Bf16>::AS_THEY_LIE ? (WIDTH < 16 ? 0 : 5)
                                  : WIDTH < 16                ? FEW_ROWS
                                                              : 8;
enum { TILES_AHEAD = 6 };

#ifdef __AVX512F__
// What a step of 64 numbers adds to the sums of even and of odd inputs.
template <class F, int R>
NATIVE_INLINE void add_step(const F* row, long stride, int step, const Bytes (&words)[2], Wide* even, Wide* odd) {
  if constexpr (Factors<F>::STEPS == 2 * TILE_BLOCKS) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const F* x = row + r * stride + 2 * step;
      even[r] = Factors<F>::add_product(even[r], Factors<F>::all(x), words[0]);
      odd[r] = Factors<F>::add_product(odd[r], Factors<F>::all(x + 1), words[1]);
    }
  } else {
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const Wide e = even_of(words[i]), o = odd_of(words[i]);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const F* x = row + r * stride + 4 * step + 2 * i;
        even[r] = Factors<F>::add_product(even[r], Factors<F>::all(x), e);
        odd[r] = Factors<F>::add_product(odd[r], Factors<F>::all(x + 1), o);
      }
    }
  }
}

// totals [R] += rows [R][32] times a tile, none of whose numbers are rare. `later`: one that is fetched meanwhile.
template <class F, int R>
NATIVE_INLINE void add_compact_tile(const F* row, long stride, const uint8_t* tile, const uint8_t* later,
                                    const HighBytes& high_bytes, Wide* totals) {
  const Bytes lower = bytes_all(0x0f);
  Wide even[R], odd[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) even[r] = odd[r] = wide_zero();
#pragma GCC unroll 4
  for (int b = 0; b < TILE_BLOCKS; b++) {
    const uint8_t* block = tile + b * BLOCK_BYTES;
    fetch_block(later + b * BLOCK_BYTES);
    const Bytes places = bytes_load(block);
    Bytes words[2];
    read_half(high_bytes, block + BLOCK, bytes_and(places, lower), words);
    add_step<F, R>(row, stride, 2 * b, words, even, odd);
    read_half(high_bytes, block + 2 * BLOCK, upper_halves(places, lower), words);
    add_step<F, R>(row, stride, 2 * b + 1, words, even, odd);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) totals[r] = wide_add(totals[r], wide_add(even[r], odd[r]));
}

// The same of a tile that has some.
template <class F, int R>
__attribute__((noinline)) void add_rare_tile(const F* row, long stride, const CompactPanel& panel,
                                             const HighBytes& high_bytes, int i, const uint8_t* later, Wide* totals) {
  alignas(64) Bf16 read[TILE];
  for (int b = 0; b < TILE_BLOCKS; b++) fetch_block(later + b * BLOCK_BYTES);
  read_tile<0>(panel, high_bytes, i, read);
  Wide even[R], odd[R];
  for (int r = 0; r < R; r++) even[r] = odd[r] = wide_zero();
  for (int step = 0; step < 2 * TILE_BLOCKS; step++) {
    const Bytes words[2] = {bytes_load(read + step * BLOCK), bytes_load(read + step * BLOCK + 32)};
    add_step<F, R>(row, stride, step, words, even, odd);
  }
  for (int r = 0; r < R; r++) totals[r] = wide_add(totals[r], wide_add(even[r], odd[r]));
}

// out [R][32] = rows [R] times k tiles of a panel.
template <class F, int R>
__attribute__((noinline)) void add_compact(const F* rows, long stride, const CompactRun& run, float* out,
                                           long out_stride) {
  const CompactPanel panel = run.panel;
  const HighBytes high_bytes(panel);
  Wide totals[2][R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) totals[0][r] = totals[1][r] = wide_zero();
  for (int k = run.first; k < run.end; k++) {
    const F* row = rows + k * Factors<F>::PER_TILE;
    if (run.aside_lines) run.aside->some(run.aside_lines);
    const uint8_t* later =
        run.at(k + TILES_AHEAD);  // `run.later` took longer: so few rows do nothing but wait for memory
#pragma GCC unroll 2
    for (int c = 0; c < 2; c++, later += COMPACT_TILE) {
      const int i = 2 * k + c;
      if (__builtin_expect(!has_rare(panel, i), 1))
        add_compact_tile<F, R>(row, stride, panel.tile(i), later, high_bytes, totals[c]);
      else add_rare_tile<F, R>(row, stride, panel, high_bytes, i, later, totals[c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int c = 0; c < 2; c++) wide_store(out + r * out_stride + c * 16, totals[c][r]);
}

template <class F, int R = 1>
void compact_rows(const F* rows, long stride, int count, const CompactRun& run, float* out, long out_stride) {
  if (count == R) add_compact<F, R>(rows, stride, run, out, out_stride);
  else if constexpr (R < most_in_registers<F>) compact_rows<F, R + 1>(rows, stride, count, run, out, out_stride);
}
#elif !defined(NATIVE_PAIRS)
// Registers of 8 outputs whose sums of even and of odd inputs are in registers at once.
template <int R> constexpr int outputs_at_once = R == 1 ? 4 : R == 2 ? 2 : 1;

// What the words of two pairs of inputs add to the sums of R rows, from the first of these inputs on.
template <int R>
NATIVE_INLINE void add_pairs_of(const float* row, long stride, const Bytes (&words)[2], Wide* even, Wide* odd) {
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const Wide e = even_of(words[i]), o = odd_of(words[i]);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const float* x = row + r * stride + 2 * i;
      even[r] = wide_fma(wide_all(x), e, even[r]), odd[r] = wide_fma(wide_all(x + 1), o, odd[r]);
    }
  }
}

// totals [C][R] += rows [R][32] times C registers of outputs, from the `first`-th on, of a k tile without rare numbers.
// `later`: one that is fetched meanwhile.
template <int R, int C>
NATIVE_INLINE void add_compact_tile(const float* row, long stride, const uint8_t* tiles, int first,
                                    const uint8_t* later, const HighBytes& high_bytes, Wide (*totals)[R]) {
  const Bytes lower = bytes_all(0x0f);
  Wide even[C][R], odd[C][R];
#pragma GCC unroll 4
  for (int c = 0; c < C; c++)
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) even[c][r] = odd[c][r] = wide_zero();
#pragma GCC unroll 1
  for (int b = 0; b < TILE_BLOCKS; b++)
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        const long at = (first + c) / 2 * COMPACT_TILE + b * BLOCK_BYTES;
        const uint8_t* block = tiles + at + (first + c) % 2 * BYTES;
        if (half == 0 && (first + c) % 2 == 0) fetch_block(later + at);
        const Bytes both = bytes_load(block);
        const Bytes places = half ? upper_halves(both, lower) : bytes_and(both, lower);
        Bytes words[2];
        read_half(high_bytes, block + (1 + half) * BLOCK, places, words);
        add_pairs_of<R>(row + 8 * b + 4 * half, stride, words, even[c], odd[c]);
      }
#pragma GCC unroll 4
  for (int c = 0; c < C; c++)
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) totals[c][r] = wide_add(totals[c][r], wide_add(even[c][r], odd[c][r]));
}

// The same, of all outputs of a k tile that has some.
template <int R>
__attribute__((noinline)) void add_rare_tiles(const float* row, long stride, const CompactPanel& panel,
                                              const HighBytes& high_bytes, int k, const uint8_t* later,
                                              Wide (*totals)[R]) {
  alignas(64) Bf16 read[2 * TILE];
  for (int at = 0; at < BOTH_TILES; at += BLOCK_BYTES) fetch_block(later + at);
  for (int i = 0; i < 2; i++) read_tile<0>(panel, high_bytes, 2 * k + i, read + i * TILE);
  for (int c = 0; c < 4; c++) {
    Wide even[R], odd[R];
    for (int r = 0; r < R; r++) even[r] = odd[r] = wide_zero();
    for (int pair = 0; pair < K_TILE / 2; pair += 2) {
      const Bf16* p = read + c / 2 * TILE + pair * 32 + c % 2 * 16;
      const Bytes words[2] = {bytes_load(p), bytes_load(p + 32)};
      add_pairs_of<R>(row + 2 * pair, stride, words, even, odd);
    }
    for (int r = 0; r < R; r++) totals[c][r] = wide_add(totals[c][r], wide_add(even[r], odd[r]));
  }
}

// out [R][32] = rows [R] times k tiles of a panel.
template <int R>
__attribute__((noinline)) void add_compact(const float* rows, long stride, const CompactRun& run, float* out,
                                           long out_stride) {
  const int C = outputs_at_once<R>;
  const CompactPanel panel = run.panel;
  const HighBytes high_bytes(panel);
  Wide totals[4][R];
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++)
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) totals[c][r] = wide_zero();
  for (int k = run.first; k < run.end; k++) {
    const float* row = rows + (long)k * K_TILE;
    if (run.aside_lines) run.aside->some(run.aside_lines);
    const uint8_t* later = run.at(k + TILES_AHEAD);
    if (__builtin_expect(has_rare(panel, 2 * k) || has_rare(panel, 2 * k + 1), 0)) {
      add_rare_tiles<R>(row, stride, panel, high_bytes, k, later, totals);
      continue;
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c += C) add_compact_tile<R, C>(row, stride, run.at(k), c, later, high_bytes, totals + c);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
    for (int c = 0; c < 4; c++) wide_store(out + r * out_stride + c * WIDTH, totals[c][r]);
}

// Gives the numbers of tile `i` whose high bytes have no place theirs, in a tile of float32.
inline void add_rare_widened(const CompactPanel& panel, int i, float* out) {
  for (int n = panel.starts()[i]; n < panel.starts()[i + 1]; n++) {
    const Rare rare = panel.rare()[n];
    ((uint8_t*)(out + rare.at / 32 * 32 + rare.at % 2 * 16 + rare.at % 32 / 2))[3] = (uint8_t)rare.high;
  }
}

// Both tiles of k tiles [first, first + count) of a panel, in float32 as `widen_tile` leaves them. `AHEAD`: bytes by
// which they are fetched, or 0.
template <int AHEAD> NATIVE_INLINE void widen_compact(const CompactPanel& panel, int first, int count, float* out) {
  const HighBytes high_bytes(panel);
  const Bytes lower = bytes_all(0x0f);
  for (int i = 2 * first; i < 2 * (first + count); i++, out += TILE) {
    const uint8_t* block = panel.tile(i);
    float* to = out;
    for (int b = 0; b < TILE_BLOCKS; b++, block += BLOCK_BYTES, to += 2 * BLOCK) {
      if (AHEAD) fetch_block(block + AHEAD);
#pragma GCC unroll 2
      for (int p = 0; p < BLOCK; p += BYTES)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
          const Bytes both = bytes_load(block + p);
          Bytes words[2];
          read_half(high_bytes, block + (1 + half) * BLOCK + p,
                    half ? upper_halves(both, lower) : bytes_and(both, lower), words);
#pragma GCC unroll 2
          for (int pair = 0; pair < 2; pair++) {
            float* inputs = to + half * BLOCK + pair * 32 + p / BYTES * WIDTH;
            wide_store(inputs, even_of(words[pair])), wide_store(inputs + 16, odd_of(words[pair]));
          }
        }
    }
    if (__builtin_expect(has_rare(panel, i), 0)) add_rare_widened(panel, i, out);
  }
}

template <class F, int R = 1>
void compact_rows(const float* rows, long stride, int count, const CompactRun& run, float* out, long out_stride) {
  if (count == R) add_compact<R>(rows, stride, run, out, out_stride);
  else if constexpr (R < most_in_registers<F>) compact_rows<F, R + 1>(rows, stride, count, run, out, out_stride);
}
#endif

}  // namespace
