// Products with weights in codes of E4M3 (`coded_order.h`): of few rows in registers, of more by tiles of bfloat16.
//
// A number is code x scale in float32, rounded to bfloat16: that of the dequantized weight. A code is half of a float16's
// bits, 2^8 times too small: scales are kept 2^8 times as large. Packing leaves weights out for which that, or a number
// that is flushed, would make a difference (`code_packing.py`).
#pragma once
#include "coded_order.h"
#include "compact_rows.h"

namespace {

// Scales of 16 outputs, twice each, as numbers of a line take them.
struct CodeScales {
  Wide of[LINE_OF_TILE / WIDTH];
#ifdef __AVX512F__
  NATIVE_INLINE_MEMBER explicit CodeScales(const float* scales) {
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const Wide all = wide_load(scales);
    of[0] = _mm512_permutexvar_ps(twice, all);
    of[1] = _mm512_permutexvar_ps(_mm512_add_epi32(twice, _mm512_set1_epi32(8)), all);
  }
#else
  NATIVE_INLINE_MEMBER explicit CodeScales(const float* scales) {
    const __m256i twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    for (int i = 0; i < 4; i++)
      of[i] = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(scales + 4 * i)), twice);
  }
#endif
};

// A register of numbers of a line, the `part`-th, of its codes.
#ifdef __AVX512F__
NATIVE_INLINE Bytes code_words(const uint8_t* line, const CodeScales& scales, int) {
  const __m512i words = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)line)), 7);
  const __m512i halves = _mm512_and_si512(words, _mm512_set1_epi16((short)0xbf80));
  const Wide low = wide_times(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), scales.of[0]);
  const Wide high = wide_times(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)), scales.of[1]);
#ifdef __AVX512BF16__
  return (Bytes)_mm512_cvtne2ps_pbh(high, low);
#else
  alignas(64) Bf16 numbers[LINE_OF_TILE];
  store(numbers, Lanes{low}), store(numbers + 16, Lanes{high});
  return bytes_load(numbers);
#endif
}
#else
NATIVE_INLINE Bytes code_words(const uint8_t* line, const CodeScales& scales, int part) {
  const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(line + 16 * part)));
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16((short)0xbf80));
  const Wide low = wide_times(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), scales.of[2 * part]);
  const Wide high = wide_times(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), scales.of[2 * part + 1]);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(to_bf16(low), to_bf16(high)), 0xd8);
}
#endif

// A tile of 16 outputs; `scales` [16]. `AHEAD`: bytes by which codes are fetched, or 0.
template <int AHEAD> NATIVE_INLINE void read_coded_tile(const uint8_t* codes, const float* scales, Bf16* out) {
  const CodeScales own(scales);
#pragma GCC unroll 4
  for (int line = 0; line < LINES_OF_TILE; line++, codes += LINE_OF_TILE, out += LINE_OF_TILE) {
    if (AHEAD && line % 2 == 0) _mm_prefetch((const char*)codes + AHEAD, _MM_HINT_T0);
    for (int part = 0; part < 2 * LINE_OF_TILE / BYTES; part++)
      bytes_store(out + part * BYTES / 2, code_words(codes, own, part));
  }
}

// Both tiles of k tiles [first, first + count) of a panel.
template <int AHEAD> NATIVE_INLINE void read_coded(const CodedPanel& panel, int first, int count, Bf16* out) {
  for (int i = 2 * first; i < 2 * (first + count); i++, out += TILE)
    read_coded_tile<AHEAD>(panel.tile(i), panel.scales(i / 2) + i % 2 * 16, out);
}

#ifdef __AVX512F__
// out [R][32] = rows [R] times k tiles [first, end) of a panel.
template <class F, int R>
__attribute__((noinline)) void add_coded(const F* rows, long stride, const CodedPanel& panel, int first, int end,
                                         float* out, long out_stride) {
  Wide totals[2][R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) totals[0][r] = totals[1][r] = wide_zero();
  for (int k = first; k < end; k++)
#pragma GCC unroll 2
    for (int c = 0; c < 2; c++) {
      const uint8_t* tile = panel.tile(2 * k + c);
      const CodeScales own(panel.scales(k) + c * 16);
      Wide even[R], odd[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) even[r] = odd[r] = wide_zero();
#pragma GCC unroll 8
      for (int step = 0; step < LINES_OF_TILE / 2; step++, tile += 2 * LINE_OF_TILE) {
        _mm_prefetch((const char*)tile + FAR_BYTES, _MM_HINT_T0);
        const Bytes words[2] = {code_words(tile, own, 0), code_words(tile + LINE_OF_TILE, own, 0)};
        add_step<F, R>(rows + k * Factors<F>::PER_TILE, stride, step, words, even, odd);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) totals[c][r] = wide_add(totals[c][r], wide_add(even[r], odd[r]));
    }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int c = 0; c < 2; c++) wide_store(out + r * out_stride + c * 16, totals[c][r]);
}

template <class F, int R = 1>
void coded_rows(const F* rows, long stride, int count, const CodedPanel& panel, int first, int end, float* out,
                long out_stride) {
  if (count == R) add_coded<F, R>(rows, stride, panel, first, end, out, out_stride);
  else if constexpr (R < most_in_registers<F>)
    coded_rows<F, R + 1>(rows, stride, count, panel, first, end, out, out_stride);
}
#elif !defined(NATIVE_PAIRS)
// Numbers of two inputs of 8 outputs, whose codes lie in turns, in float32.
NATIVE_INLINE void code_numbers(const uint8_t* codes, Wide scales, Wide& even, Wide& odd) {
  const __m128i both = _mm_loadu_si128((const __m128i*)codes), kept = _mm_set1_epi16((short)0xbf80);
  const __m128i low = _mm_and_si128(_mm_srai_epi16(_mm_slli_epi16(both, 8), 1), kept);
  const __m128i high = _mm_and_si128(_mm_srai_epi16(both, 1), kept);
  even = kept_in_bf16(wide_times(_mm256_cvtph_ps(low), scales));
  odd = kept_in_bf16(wide_times(_mm256_cvtph_ps(high), scales));
}

// out [R][32] = rows [R] times k tiles [first, end) of a panel.
template <int R>
__attribute__((noinline)) void add_coded(const float* rows, long stride, const CodedPanel& panel, int first, int end,
                                         float* out, long out_stride) {
  Wide totals[4][R];
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++)
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) totals[c][r] = wide_zero();
  for (int k = first; k < end; k++)
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      const uint8_t* line = panel.tile(2 * k + c / 2) + c % 2 * 16;
      const Wide scales = wide_load(panel.scales(k) + c * 8);
      Wide even[R], odd[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) even[r] = odd[r] = wide_zero();
#pragma GCC unroll 4
      for (int step = 0; step < LINES_OF_TILE; step++, line += LINE_OF_TILE) {
        if (c % 2 == 0 && step % 2 == 0) _mm_prefetch((const char*)line + FAR_BYTES, _MM_HINT_T0);
        Wide e, o;
        code_numbers(line, scales, e, o);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          const float* x = rows + r * stride + k * K_TILE + 2 * step;
          even[r] = wide_fma(wide_all(x), e, even[r]);
          odd[r] = wide_fma(wide_all(x + 1), o, odd[r]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) totals[c][r] = wide_add(totals[c][r], wide_add(even[r], odd[r]));
    }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
    for (int c = 0; c < 4; c++) wide_store(out + r * out_stride + c * 8, totals[c][r]);
}

template <int R = 1>
void coded_rows(const float* rows, long stride, int count, const CodedPanel& panel, int first, int end, float* out,
                long out_stride) {
  if (count == R) add_coded<R>(rows, stride, panel, first, end, out, out_stride);
  else if constexpr (R < FEW_ROWS) coded_rows<R + 1>(rows, stride, count, panel, first, end, out, out_stride);
}

// Both tiles of k tiles [first, first + count) of a panel, in float32 as `widen_tile` leaves them.
NATIVE_INLINE void widen_coded(const CodedPanel& panel, int first, int count, float* out) {
  for (int i = 2 * first; i < 2 * (first + count); i++, out += TILE)
    for (int half = 0; half < 16; half += 8) {
      const uint8_t* line = panel.tile(i) + 2 * half;
      const Wide scales = wide_load(panel.scales(i / 2) + i % 2 * 16 + half);
#pragma GCC unroll 4
      for (int pair = 0; pair < LINES_OF_TILE; pair++, line += LINE_OF_TILE) {
        if (half == 0 && pair % 2 == 0) _mm_prefetch((const char*)line + FAR_BYTES, _MM_HINT_T0);
        Wide even, odd;
        code_numbers(line, scales, even, odd);
        wide_store(out + pair * 32 + half, even), wide_store(out + pair * 32 + 16 + half, odd);
      }
    }
}
#endif

}  // namespace
