// A block of products by VDPBF16PS, 4 rows by 32 outputs, in assembly: compilers move its registers about, which takes 5 %.
//
// Registers 0 to 7 sum the even inputs (two for a row), 8 to 15 the odd ones; 24 to 27 hold weights, 28 and 29 inputs. The
// order of adding is that of `add_both` (`fma.h`), and so are the bits. Other blocks do not live here.
#pragma once
#include "factors.h"

namespace {

template <class F> constexpr bool has_block_4x2 = false;

#if defined(NATIVE_PAIRS) && defined(__AVX512BF16__)
template <> constexpr bool has_block_4x2<Pair> = true;

// A row's next pairs of even and of odd inputs, and their products.
#define NATIVE_ROW(x, even, odd, even0, even1, odd0, odd1)                                 \
  "vpbroadcastd " even x                                                                   \
  ", %%zmm28\n"                                                                            \
  "vpbroadcastd " odd x                                                                    \
  ", %%zmm29\n"                                                                            \
  "vdpbf16ps %%zmm24, %%zmm28, %%zmm" #even0 "\n vdpbf16ps %%zmm25, %%zmm28, %%zmm" #even1 \
  "\n"                                                                                     \
  "vdpbf16ps %%zmm26, %%zmm29, %%zmm" #odd0 "\n vdpbf16ps %%zmm27, %%zmm29, %%zmm" #odd1 "\n"
// Four inputs: where they lie in a tile (even and odd) and in a row.
#define NATIVE_STEP(even_w, odd_w, even, odd)                         \
  "vmovdqu64 " even_w "(%[left]), %%zmm24\n vmovdqu64 " even_w        \
  "(%[right]), %%zmm25\n"                                             \
  "vmovdqu64 " odd_w "(%[left]), %%zmm26\n vmovdqu64 " odd_w          \
  "(%[right]), %%zmm27\n" NATIVE_ROW("(%[x])", even, odd, 0, 1, 8, 9) \
      NATIVE_ROW("(%[x],%[stride])", even, odd, 2, 3, 10, 11)         \
          NATIVE_ROW("(%[x],%[stride],2)", even, odd, 4, 5, 12, 13) NATIVE_ROW("(%[x3])", even, odd, 6, 7, 14, 15)
#define NATIVE_CLEAR(sum) "vpxord %%zmm" #sum ", %%zmm" #sum ", %%zmm" #sum "\n"
#define NATIVE_ADD(even, odd, total)                  \
  "vaddps %%zmm" #odd ", %%zmm" #even ", %%zmm" #even \
  "\n"                                                \
  "vaddps " total ", %%zmm" #even ", %%zmm" #even     \
  "\n"                                                \
  "vmovups %%zmm" #even ", " total "\n"

// sums [4][32] += rows [4][32 inputs] times the tiles of two columns.
NATIVE_INLINE void add_block_4x2(const Pair* rows, long stride, const Bf16* left, const Bf16* right, float* sums,
                                 long sums_stride) {
  asm volatile(
      NATIVE_CLEAR(0) NATIVE_CLEAR(1) NATIVE_CLEAR(2) NATIVE_CLEAR(3) NATIVE_CLEAR(4) NATIVE_CLEAR(5) NATIVE_CLEAR(6)
          NATIVE_CLEAR(7) NATIVE_CLEAR(8) NATIVE_CLEAR(9) NATIVE_CLEAR(10) NATIVE_CLEAR(11) NATIVE_CLEAR(12)
              NATIVE_CLEAR(13) NATIVE_CLEAR(14) NATIVE_CLEAR(15) NATIVE_STEP("0", "64", "0", "4") NATIVE_STEP(
                  "128", "192", "8", "12") NATIVE_STEP("256", "320", "16", "20") NATIVE_STEP("384", "448", "24", "28")
                  NATIVE_STEP("512", "576", "32", "36") NATIVE_STEP("640", "704", "40", "44")
                      NATIVE_STEP("768", "832", "48", "52") NATIVE_STEP("896", "960", "56", "60")
                          NATIVE_ADD(0, 8, "(%[y])") NATIVE_ADD(1, 9, "64(%[y])")
                              NATIVE_ADD(2, 10, "(%[y],%[y_stride])") NATIVE_ADD(3, 11, "64(%[y],%[y_stride])")
                                  NATIVE_ADD(4, 12, "(%[y],%[y_stride],2)") NATIVE_ADD(5, 13, "64(%[y],%[y_stride],2)")
                                      NATIVE_ADD(6, 14, "(%[y3])") NATIVE_ADD(7, 15, "64(%[y3])")
      :
      : [x] "r"(rows), [x3] "r"(rows + 3 * stride), [stride] "r"(stride * (long)sizeof(Pair)), [left] "r"(left),
        [right] "r"(right), [y] "r"(sums), [y3] "r"(sums + 3 * sums_stride), [y_stride] "r"(sums_stride * 4)
      : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12",
        "xmm13", "xmm14", "xmm15", "xmm24", "xmm25", "xmm26", "xmm27", "xmm28", "xmm29", "memory");
}
#undef NATIVE_ROW
#undef NATIVE_STEP
#undef NATIVE_CLEAR
#undef NATIVE_ADD
#endif

}  // namespace
