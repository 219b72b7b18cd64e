// Factors of products: numbers in float32, or pairs of bfloat16 that one instruction multiplies and adds.
//
// A tile's even inputs are summed one after the other, and so are its odd ones. VDPBF16PS adds two products to a sum, first
// that of the upper halves, then that of the lower ones, each rounded by itself: two steps of this order, if a pair holds two
// even inputs or two odd ones that follow one another. Which sums are made of factors does not live here.
#pragma once
#include "lanes.h"
#include "tile_order.h"

namespace {

// Where input k of output n lies in a tile.
template <class W> NATIVE_INLINE int place(int k, int n) { return in_pairs(k, n); }
template <> inline int place<float>(int k, int n) { return in_lines(k, n); }

// The inputs of pair `pair` for outputs `col` onwards.
template <class W> NATIVE_INLINE const W* pair_at(const W* tile, int pair, int col) {
  return tile + pair * 32 + col * 2;
}
NATIVE_INLINE const float* pair_at(const float* tile, int pair, int col) { return tile + pair * 32 + col; }

// How factors of a kind lie in a row, and are multiplied with those of a tile, in `STEPS` steps over its even or odd inputs.
template <class F> struct Factors {
  enum { PER_TILE = 32, STEPS = 16 };
  typedef Wide Many;
  static NATIVE_INLINE_MEMBER Many all(const float* x) { return wide_all(x); }
  template <class W> static NATIVE_INLINE_MEMBER Many even(const W* tile, int step, int col) {
    return even_of(pair_at(tile, step, col));
  }
  template <class W> static NATIVE_INLINE_MEMBER Many odd(const W* tile, int step, int col) {
    return odd_of(pair_at(tile, step, col));
  }
  static NATIVE_INLINE_MEMBER Wide add_product(Wide sum, Many x, Many w) { return wide_fma(x, w, sum); }
};

// What a model's rows are multiplied as; and whether its tiles are factors as they lie.
template <class W> struct FactorOf {
  typedef float Type;
  enum { AS_THEY_LIE = sizeof(W) == sizeof(float) };
};

// 16 numbers of a row as factors.
template <class From> NATIVE_INLINE void store_factors(float* to, const From* from) { store(to, load(from)); }
// A tile as one of float32.
template <class W> NATIVE_INLINE void widen_tile(const W* tile, float* out) {
  for (int pair = 0; pair < 16; pair++)
    for (int col = 0; col < 16; col += WIDTH) {
      const W* p = pair_at(tile, pair, col);
      wide_store(out + pair * 32 + col, even_of(p)), wide_store(out + pair * 32 + 16 + col, odd_of(p));
    }
}

#ifdef NATIVE_PAIRS
struct Pair {
  uint32_t bits;  // the first one in the upper half
};

template <> inline int place<Bf16>(int k, int n) { return in_fours(k, n); }

template <> struct FactorOf<Bf16> {
  typedef Pair Type;
  enum { AS_THEY_LIE = 1 };
};

template <> struct Factors<Pair> {
  enum { PER_TILE = 16, STEPS = 8 };
  typedef WidePairs Many;
  static NATIVE_INLINE_MEMBER Many all(const Pair* x) { return pairs_all(x->bits); }
  static NATIVE_INLINE_MEMBER Many even(const Bf16* tile, int step, int col) {
    return pairs_load(tile + step * 64 + col * 2);
  }
  static NATIVE_INLINE_MEMBER Many odd(const Bf16* tile, int step, int col) { return even(tile + 32, step, col); }
  static NATIVE_INLINE_MEMBER Wide add_product(Wide sum, Many x, Many w) { return wide_two_products(sum, x, w); }
};

// Of four inputs, even and odd: x2 x0 x3 x1 from the lowest word on.
NATIVE_INLINE void store_factors(Pair* to, const Bf16* from) {
  __m256i words = _mm256_loadu_si256((const __m256i*)from);
  words = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0x72), 0x72);
  _mm256_storeu_si256((__m256i*)to, words);
}
#endif

// So many factors are this many inputs, a multiple of 16.
template <class F> NATIVE_INLINE long factors_in(long inputs) { return inputs * Factors<F>::PER_TILE / K_TILE; }

}  // namespace
