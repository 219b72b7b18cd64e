// Recurrences of a matrix, token by token: their bits depend on nothing but the tokens.
//
//   S = decay S0 + k (x) write;  out = S^T q
//   write = rate (v - decay S0^T k)   the gated delta rule
//   write = rate v                    the state space of Mamba2, which also adds skip v to `out`
//
// The decay is one number of a head, or one of each key (Kimi Delta Attention): then decay S0^T k = S0^T (decay k).
//
// A state of a head lies in tiles of 32 columns, [tiles][keys][32] float32, so that one stays in the first cache while tokens
// pass it. A lane is a column: sums over keys run inside a lane, in chains of 32 fused multiply-adds from +0, added from first
// to last. So the bits are the same for any width of vectors, and for any tokens that come in the same call. The next token's
// S^T k is summed while S is written: one pass over a state takes a token. Why tokens do not go in chunks: docs/gated-delta-net.md.
#pragma once
#include "functions.h"

namespace {

enum { STATE_COLUMNS = 32, KEY_CHAIN = 32 };

// `N` times 16 columns: memory = S^T k.
template <int N> NATIVE_INLINE void recall(const float* state, const float* k, int keys, Lanes memory[N]) {
  for (int from = 0; from < keys; from += KEY_CHAIN) {
    const int end = from + KEY_CHAIN < keys ? from + KEY_CHAIN : keys;
    Lanes sum[N];
    for (int c = 0; c < N; c++) sum[c] = zero();
    for (int i = from; i < end; i++)
      for (int c = 0; c < N; c++) sum[c] = fma(all(k[i]), load(state + i * STATE_COLUMNS + c * 16), sum[c]);
    for (int c = 0; c < N; c++) memory[c] = from ? memory[c] + sum[c] : sum[c];
  }
}
// S = decay S + k (x) write; out = S^T q; where a token follows, memory = S^T (its k), which is `next`. `decays` [keys], or null.
template <int N, bool IS_LAST, bool BY_KEY>
NATIVE_INLINE void advance(float* state, const float* k, const float* q, int keys, Lanes decay, const float* decays,
                           const Lanes write[N], const float* next, Lanes out[N], Lanes memory[N]) {
  for (int from = 0; from < keys; from += KEY_CHAIN) {
    const int end = from + KEY_CHAIN < keys ? from + KEY_CHAIN : keys;
    Lanes sum[N], seen[N];
    for (int c = 0; c < N; c++) sum[c] = seen[c] = zero();
    for (int i = from; i < end; i++) {
      // Loaded before the stores, which might change them for all that the compiler knows: else each vector loads them again.
      const Lanes key = all(k[i]), query = all(q[i]), other = IS_LAST ? key : all(next[i]);
      const Lanes fade = BY_KEY ? all(decays[i]) : decay;
      for (int c = 0; c < N; c++) {
        float* at = state + i * STATE_COLUMNS + c * 16;
        Lanes s = fma(key, write[c], fade * load(at));
        store(at, s);
        sum[c] = fma(query, s, sum[c]);
        if (!IS_LAST) seen[c] = fma(other, s, seen[c]);
      }
    }
    for (int c = 0; c < N; c++) {
      out[c] = from ? out[c] + sum[c] : sum[c];
      if (!IS_LAST) memory[c] = from ? memory[c] + seen[c] : seen[c];
    }
  }
}

// Rows of one head: q, k [count][keys], v and out [count][stride]; decay and rate of each token; the head's skip, or null for
// the delta rule. With a decay for each key, `decay` is [count][keys], and `faded` has decay k; else `faded` is null.
struct HeadTokens {
  const float *q, *k, *faded, *v, *decay, *rate;
  float* out;
  long stride;
  int keys, count;
  const float* skip;
};

template <int N, bool BY_KEY> NATIVE_INLINE void delta_columns(float* state, const HeadTokens& t, int column) {
  Lanes memory[N], write[N], read[N];
  const float* seen = BY_KEY ? t.faded : t.k;
  recall<N>(state, seen, t.keys, memory);
  for (int i = 0; i < t.count; i++) {
    const long at = (long)i * t.keys;
    const float *k = t.k + at, *q = t.q + at, *v = t.v + i * t.stride + column, *next = seen + at + t.keys;
    const float* decays = BY_KEY ? t.decay + at : nullptr;
    const Lanes decay = all(BY_KEY ? 1.0f : t.decay[i]), rate = all(t.rate[i]);
    for (int c = 0; c < N; c++)
      write[c] = rate * (BY_KEY ? load(v + c * 16) - memory[c] : minus_fma(decay, memory[c], load(v + c * 16)));
    if (i + 1 < t.count) advance<N, false, BY_KEY>(state, k, q, t.keys, decay, decays, write, next, read, memory);
    else advance<N, true, BY_KEY>(state, k, q, t.keys, decay, decays, write, next, read, memory);
    for (int c = 0; c < N; c++) store(t.out + i * t.stride + column + c * 16, read[c]);
  }
}

template <int N> NATIVE_INLINE void space_columns(float* state, const HeadTokens& t, int column) {
  Lanes none[N], write[N], read[N];
  for (int i = 0; i < t.count; i++) {
    const float *k = t.k + (long)i * t.keys, *q = t.q + (long)i * t.keys, *v = t.v + i * t.stride + column;
    for (int c = 0; c < N; c++) write[c] = all(t.rate[i]) * load(v + c * 16);
    advance<N, true, false>(state, k, q, t.keys, all(t.decay[i]), nullptr, write, k, read, none);
    for (int c = 0; c < N; c++)
      store(t.out + i * t.stride + column + c * 16, fma(all(*t.skip), load(v + c * 16), read[c]));
  }
}

template <int N> NATIVE_INLINE void columns_pass(float* state, const HeadTokens& tokens, int column) {
  if (tokens.skip) return space_columns<N>(state, tokens, column);
  return tokens.faded ? delta_columns<N, true>(state, tokens, column) : delta_columns<N, false>(state, tokens, column);
}

// All tokens pass a tile of a state, columns [column, column + 32). Where registers are few and several tokens come, halves
// of a tile take turns: then nothing is spilled; a single token reads whole lines, for its state comes from memory.
__attribute__((noinline)) void pass_tile(float* tile, const HeadTokens& tokens, int column) {
  if (WIDTH == 16 || tokens.count == 1) return columns_pass<2>(tile, tokens, column);
  columns_pass<1>(tile, tokens, column), columns_pass<1>(tile + 16, tokens, column + 16);
}

// --- what goes in and comes out ---

// log(1 + e^x) = max(x, 0) + log(1 + u), u = e^-|x|, by log(1 + u) = 2 atanh(u / (2 + u)).
NATIVE_INLINE Lanes softplus_of(Lanes x) {
  Lanes u = exp_of(all(0.0f) - absolute(x)), s = u / (all(2.0f) + u), z = s * s, p = all(2.0f / 17);
#pragma GCC unroll 8
  for (int odd = 15; odd > 0; odd -= 2) p = fma(p, z, all(2.0f / (float)odd));
  return fma(p, s, larger(zero(), x));
}
// The sum of squares of x [n], n a multiple of 16: four sums, added pairwise.
NATIVE_INLINE float sum_of_squares(const float* x, int n) {
  Lanes sum[4];
  for (auto& s : sum) s = zero();
  for (int i = 0; i < n; i += 16) sum[i / 16 % 4] = fma(load(x + i), load(x + i), sum[i / 16 % 4]);
  return sum_of((sum[0] + sum[1]) + (sum[2] + sum[3]));
}
NATIVE_INLINE void scale_row(float* x, int n, float by) {
  for (int i = 0; i < n; i += 16) store(x + i, load(x + i) * all(by));
}
// x over its length, times `by`.
NATIVE_INLINE void unit_row(float* x, int n, float by) {
  scale_row(x, n, by / square_root(sum_of_squares(x, n) + 1e-6f));
}
// An RMSNorm of x [n], then times SiLU of `gate`, or its sigmoid, a block of 16 at a time.
template <class Put>
NATIVE_INLINE void gated_norm(const float* x, const float* gate, bool is_sigmoid, const float* weight, float eps, int n,
                              Put&& put) {
  Lanes inverse = all(1.0f / square_root(sum_of_squares(x, n) / (float)n + eps));
  for (int i = 0; i < n; i += 16) {
    const Lanes z = load(gate + i);
    put(i, load(x + i) * inverse * load(weight + i) * (is_sigmoid ? sigmoid_of(z) : silu_of(z)));
  }
}

}  // namespace
