// Attention straight from the pages of the KV cache, in tiles of 64 keys from position 0.
//
// A page belongs to one block and one KV head: keys [block / 16][dims / 32][16 pairs of dims][16 keys][2], then values
// [block / span][dims / 16][span / 2 pairs of keys][16 dims][2], with spans of 32 keys, or 16 where blocks are that small: tiles
// as they are multiplied. A row is a token and a query head. What it computes depends on its own position alone: the tiles
// start at fixed positions, a tile that it does not see leaves it as it is, and contexts longer than `SPLIT` keys are
// cut at fixed places, each part summed by itself (by any thread) and merged in order.
#pragma once
#include "functions.h"
#include "linear.h"

namespace {

enum { KEYS = 64, QUERY_ROWS = 64, MAX_HEAD = 256, SPLIT = 1024, SUB_PAGE = 16 };

struct HeadShape {
  int num_heads, num_kv_heads, head_dim;
  int key_tiles, value_tiles;  // tiles of 32 and of 16 dimensions
  int block_size, span;        // keys of a page, and of a tile of its values
  int window;                  // keys that a query sees; 0: all
  float scale, softcap;        // scale of scores in units of log2; softcap 0: none (then scores are tanh'ed at `cap_scale`)
  float cap_scale;
  const float* sinks;
  int group() const { return num_heads / num_kv_heads; }
  int padded() const { return key_tiles * 32; }
  int value_dims() const { return value_tiles * 16; }
  long key_elements() const { return (long)block_size * padded(); }
  long page_elements() const { return key_elements() + (long)block_size * value_dims(); }
};

// One sequence of a step, as attention sees it.
struct SequenceView {
  int first_row, first_position, num_tokens;
  const int* blocks;
};

// What rows have summed so far: the largest score, the sum of powers (16 partial sums), and the weighted values.
struct Softmax {
  alignas(64) float largest[QUERY_ROWS];
  alignas(64) float sums[QUERY_ROWS * 16];
  alignas(64) float values[QUERY_ROWS * MAX_HEAD];
};

template <class W> struct AttentionScratch {
  typedef typename InputOf<W>::Type Input;
  Softmax total, part;
  alignas(64) float scores[QUERY_ROWS * KEYS];
  alignas(64) Input weights[QUERY_ROWS * KEYS];
  alignas(64) Input queries[QUERY_ROWS * MAX_HEAD];
  alignas(64) float query_floats[QUERY_ROWS * MAX_HEAD];
  alignas(64) float weight_floats[QUERY_ROWS * KEYS];
  alignas(64) W joined[TILE];
};

template <class W> struct Pages {
  const W* base;  // of this layer
  HeadShape shape;
  const W* page(int block, int kv_head) const {
    return base + ((long)block * shape.num_kv_heads + kv_head) * shape.page_elements();
  }
};

// The tile of 16 keys (a sub-page) at position `key`, dimensions 32 * d onwards.
template <class W> HF_INLINE const W* key_tile(const Pages<W>& pages, const SequenceView& seq, int kv_head, int key) {
  int in_block = key % pages.shape.block_size;
  return pages.page(seq.blocks[key / pages.shape.block_size], kv_head) + (long)in_block / SUB_PAGE * pages.shape.key_tiles * TILE;
}
template <class W> HF_INLINE const W* value_span(const Pages<W>& pages, const SequenceView& seq, int kv_head, int key) {
  const HeadShape& s = pages.shape;
  int in_block = key % s.block_size;
  return pages.page(seq.blocks[key / s.block_size], kv_head) + s.key_elements() +
         (long)in_block / s.span * s.span * s.value_dims();
}
// The values of 32 keys from `key` on, 16 dimensions: a tile. Two spans of 16 are put together; `num_keys` of them exist.
template <class W>
HF_INLINE const W* value_tile(const Pages<W>& pages, const SequenceView& seq, int kv_head, int key, int num_keys, int dims, W* joined) {
  const W* first = value_span(pages, seq, kv_head, key) + (long)dims * pages.shape.span * 16;
  if (pages.shape.span == 32) return first;
  memcpy(joined, first, TILE / 2 * sizeof(W));
  if (num_keys > 16)
    memcpy(joined + TILE / 2, value_span(pages, seq, kv_head, key + 16) + (long)dims * 16 * 16, TILE / 2 * sizeof(W));
  else memset((void*)(joined + TILE / 2), 0, TILE / 2 * sizeof(W));
  return joined;
}

// out [rows][16 of `out_stride`] = (or +=) floats [rows][32] times one tile, in the order of `tiles.h`.
template <class W, bool ADD>
HF_INLINE void fma_tile(const float* rows, long stride, int count, const W* tile, float* out, long out_stride) {
  for (int col = 0; col < 16; col += WIDTH) {
    int r = 0;
    for (; r + 4 <= count; r += 4) {
      Wide even[4], odd[4];
      for (int i = 0; i < 4; i++) even[i] = odd[i] = wide_zero();
      for (int pair = 0; pair < 16; pair++) {
        const W* p = pair_at(tile, pair, col);
        Wide e = even_of(p), o = odd_of(p);
        for (int i = 0; i < 4; i++) {
          even[i] = wide_fma(wide_all(rows + (r + i) * stride + 2 * pair), e, even[i]);
          odd[i] = wide_fma(wide_all(rows + (r + i) * stride + 2 * pair + 1), o, odd[i]);
        }
      }
      for (int i = 0; i < 4; i++) {
        float* c = out + (r + i) * out_stride + col;
        wide_store(c, wide_add(ADD ? wide_load(c) : wide_zero(), wide_add(even[i], odd[i])));
      }
    }
    for (; r < count; r++) {
      Wide even = wide_zero(), odd = wide_zero();
      for (int pair = 0; pair < 16; pair++) {
        const W* p = pair_at(tile, pair, col);
        even = wide_fma(wide_all(rows + r * stride + 2 * pair), even_of(p), even);
        odd = wide_fma(wide_all(rows + r * stride + 2 * pair + 1), odd_of(p), odd);
      }
      float* c = out + r * out_stride + col;
      wide_store(c, wide_add(ADD ? wide_load(c) : wide_zero(), wide_add(even, odd)));
    }
  }
}

// Scores [rows][64] of up to 16 rows from `row` on with the keys from `key` on, of which `num_keys` exist.
template <class W>
HF_INLINE void score_rows(Tiles& t, AttentionScratch<W>& a, const Pages<W>& pages, const SequenceView& seq, int kv_head,
                          int row, int count, int key, int num_keys) {
  int key_tiles = pages.shape.key_tiles, padded = pages.shape.padded(), num_tiles = (num_keys + 15) / 16;
#ifdef HF_TILES
  if constexpr (sizeof(W) == 2 && sizeof(typename InputOf<W>::Type) == 2) {
    const W* keys[4] = {};
    for (int b = 0; b < num_tiles; b++) keys[b] = key_tile(pages, seq, kv_head, key + 16 * b);
    shape_tiles(t, ATTENTION, count, count);
    tile_zero<0>(t), tile_zero<1>(t), tile_zero<2>(t), tile_zero<3>(t);
    for (int d = 0; d < key_tiles; d++) {
      tile_load<4>(t, a.queries + row * padded + d * 32, padded * 2);
      tile_load<6>(t, keys[0] + d * TILE, 64), tile_product<0, 4, 6>(t);
      if (num_tiles > 1) tile_load<7>(t, keys[1] + d * TILE, 64), tile_product<1, 4, 7>(t);
      if (num_tiles > 2) tile_load<6>(t, keys[2] + d * TILE, 64), tile_product<2, 4, 6>(t);
      if (num_tiles > 3) tile_load<7>(t, keys[3] + d * TILE, 64), tile_product<3, 4, 7>(t);
    }
    float* scores = a.scores + row * KEYS;
    tile_store<0>(t, scores, KEYS * 4), tile_store<1>(t, scores + 16, KEYS * 4);
    tile_store<2>(t, scores + 32, KEYS * 4), tile_store<3>(t, scores + 48, KEYS * 4);
    return;
  }
#endif
  for (int b = 0; b < num_tiles; b++) {
    const W* keys = key_tile(pages, seq, kv_head, key + 16 * b);
    for (int d = 0; d < key_tiles; d++) {
      const float* rows = a.query_floats + row * padded + d * 32;
      float* scores = a.scores + row * KEYS + 16 * b;
      if (d) fma_tile<W, true>(rows, padded, count, keys + d * TILE, scores, KEYS);
      else fma_tile<W, false>(rows, padded, count, keys, scores, KEYS);
    }
  }
}

// values [rows][dims] += weights [rows][64] times the values of the keys from `key` on, for rows from `row` on.
template <class W>
HF_INLINE void add_values(Tiles& t, AttentionScratch<W>& a, const Pages<W>& pages, const SequenceView& seq, int kv_head,
                          float* values, int row, int count, int key, int num_keys) {
  values += (long)row * pages.shape.value_dims();
  int dims = pages.shape.value_dims(), num_spans = (num_keys + 31) / 32;
#ifdef HF_TILES
  if constexpr (sizeof(W) == 2 && sizeof(typename InputOf<W>::Type) == 2) {
    shape_tiles(t, ATTENTION, count, count);
    for (int v = 0; v < pages.shape.value_tiles; v += 4) {
      int some = pages.shape.value_tiles - v < 4 ? pages.shape.value_tiles - v : 4;
      float* out = values + v * 16;
      tile_load<0>(t, out, dims * 4);
      if (some > 1) tile_load<1>(t, out + 16, dims * 4);
      if (some > 2) tile_load<2>(t, out + 32, dims * 4);
      if (some > 3) tile_load<3>(t, out + 48, dims * 4);
      for (int s = 0; s < num_spans; s++) {
        int at = key + 32 * s, have = num_keys - 32 * s;
        tile_load<4>(t, a.weights + row * KEYS + 32 * s, KEYS * 2);
        tile_load<6>(t, value_tile(pages, seq, kv_head, at, have, v, a.joined), 64), tile_product<0, 4, 6>(t);
        if (some > 1) tile_load<7>(t, value_tile(pages, seq, kv_head, at, have, v + 1, a.joined), 64), tile_product<1, 4, 7>(t);
        if (some > 2) tile_load<6>(t, value_tile(pages, seq, kv_head, at, have, v + 2, a.joined), 64), tile_product<2, 4, 6>(t);
        if (some > 3) tile_load<7>(t, value_tile(pages, seq, kv_head, at, have, v + 3, a.joined), 64), tile_product<3, 4, 7>(t);
      }
      tile_store<0>(t, out, dims * 4);
      if (some > 1) tile_store<1>(t, out + 16, dims * 4);
      if (some > 2) tile_store<2>(t, out + 32, dims * 4);
      if (some > 3) tile_store<3>(t, out + 48, dims * 4);
    }
    return;
  }
#endif
  for (int s = 0; s < num_spans; s++)
    for (int v = 0; v < pages.shape.value_tiles; v++) {
      const W* tile = value_tile(pages, seq, kv_head, key + 32 * s, num_keys - 32 * s, v, a.joined);
      fma_tile<W, true>(a.weight_floats + row * KEYS + 32 * s, KEYS, count, tile, values + v * 16, dims);
    }
}

// The keys that a query at `position` sees: [first, position].
HF_INLINE int first_key(const HeadShape& shape, int position) {
  return shape.window && position >= shape.window ? position - shape.window + 1 : 0;
}

// Turns the scores of one tile into weights, and scales what the rows have summed where a larger score came up.
template <class W>
HF_INLINE void weigh_rows(AttentionScratch<W>& a, const HeadShape& shape, const int* positions, Softmax& sum, int row, int count, int key) {
  alignas(64) float change[16] = {}, factor[16];
  int firsts[16], ends[16];
  float scale = shape.softcap > 0 ? 1.0f : shape.scale;
  for (int r = 0; r < count; r++) {
    int first = firsts[r] = first_key(shape, positions[r]) - key, end = ends[r] = positions[r] + 1 - key;
    if (end <= 0 || first >= KEYS) continue;
    float* scores = a.scores + (row + r) * KEYS;
    Lanes best = all(-INFINITY);
    bool is_cut = first > 0 || end < KEYS;
    if (shape.softcap > 0 || is_cut)
      for (int j = 0; j < KEYS; j += 16) {
        Lanes s = load(scores + j);
        if (shape.softcap > 0) s = tanh_of(s * all(shape.cap_scale)) * all(shape.softcap);
        if (is_cut) s = keep_range(s, first - j, end - j, all(-INFINITY));
        store(scores + j, s);
      }
    for (int j = 0; j < KEYS; j += 16) best = larger(best, load(scores + j));
    float before = sum.largest[row + r], now = largest_of(best) * scale;
    if (before > now) now = before;
    change[r] = before - now;
    sum.largest[row + r] = now;
  }
  store(factor, exp2_of(load(change)));
  int dims = shape.value_dims();
  for (int r = 0; r < count; r++) {
    typename InputOf<W>::Type* weights = a.weights + (row + r) * KEYS;
    if (ends[r] <= 0 || firsts[r] >= KEYS) {
      for (int j = 0; j < KEYS; j += 16) store(weights + j, zero());
      continue;
    }
    Lanes minus_largest = all(-sum.largest[row + r]);
    Lanes total = load(sum.sums + (row + r) * 16) * all(factor[r]);
    for (int j = 0; j < KEYS; j += 16) {
      Lanes p = exp2_of(fma(load(a.scores + (row + r) * KEYS + j), all(scale), minus_largest));
      total = total + p;
      store(weights + j, p);
    }
    store(sum.sums + (row + r) * 16, total);
    if (factor[r] != 1.0f)
      for (int j = 0; j < dims; j += 16) {
        float* v = sum.values + (row + r) * dims + j;
        store(v, load(v) * all(factor[r]));
      }
  }
}

template <class W> HF_INLINE void widen_weights(AttentionScratch<W>& a, int row, int count) {
  for (int i = row * KEYS; i < (row + count) * KEYS; i += 16) store(a.weight_floats + i, load(a.weights + i));
}

// Adds the keys [from, to) to what rows [0, count) have summed. `to` is beyond no row's context but the longest's.
template <class W>
void attend_keys(Tiles& t, AttentionScratch<W>& a, const Pages<W>& pages, const SequenceView& seq, int kv_head,
                 const int* positions, int count, int from, int to, Softmax& sum) {
  int dims = pages.shape.value_dims();
  for (int r = 0; r < count; r++) sum.largest[r] = -INFINITY;
  memset(sum.sums, 0, count * 16 * 4);
  memset(sum.values, 0, (long)count * dims * 4);
  for (int key = from; key < to; key += KEYS) {
    int num_keys = to - key < KEYS ? to - key : KEYS;
    int first = 0;  // the rows that see any of these keys: they are in order of position
    while (first + 16 < count && positions[first + 15] < key) first += 16;
    auto blocks = [&](auto&& each) {
      for (int row = first; row < count; row += 16) each(row, count - row < 16 ? count - row : 16);
    };
    // One after the other for all rows: what was stored has arrived when it is loaded as a tile.
    blocks([&](int row, int some) { score_rows(t, a, pages, seq, kv_head, row, some, key, num_keys); });
    blocks([&](int row, int some) { weigh_rows(a, pages.shape, positions + row, sum, row, some, key); });
#ifdef HF_TILES
    if constexpr (sizeof(typename InputOf<W>::Type) == 4)
#endif
      blocks([&](int row, int some) { widen_weights(a, row, some); });
    blocks([&](int row, int some) { add_values(t, a, pages, seq, kv_head, sum.values, row, some, key, num_keys); });
  }
}

// Adds the sums of further keys, or of a sink, to a row's. A row that has seen none of them stays as it is.
HF_INLINE void merge_row(float* largest, float* sums, float* values, float other_largest, const float* other_sums,
                         const float* other_values, int dims) {
  if (other_largest == -INFINITY) return;
  if (*largest == -INFINITY) {
    *largest = other_largest;
    memcpy(sums, other_sums, 64), memcpy(values, other_values, dims * 4);
    return;
  }
  float now = *largest > other_largest ? *largest : other_largest;
  alignas(64) float factor[16] = {*largest - now, other_largest - now};
  store(factor, exp2_of(load(factor)));
  Lanes mine = all(factor[0]), others = all(factor[1]);
  *largest = now;
  store(sums, fma(load(other_sums), others, load(sums) * mine));
  for (int j = 0; j < dims; j += 16) store(values + j, fma(load(other_values + j), others, load(values + j) * mine));
}

HF_INLINE void add_sink(float* largest, float* sums, float* values, float sink, int dims) {
  alignas(64) float one[16] = {1.0f}, nothing[MAX_HEAD] = {};
  merge_row(largest, sums, values, sink * LOG2_E, one, nothing, dims);
}

// The rows of one task: tokens [.., ..) of a sequence times the query heads of one KV head, in order of position.
template <class W> struct QueryRows {
  int count;
  int positions[QUERY_ROWS], tokens[QUERY_ROWS], heads[QUERY_ROWS];
};

template <class W>
HF_INLINE void gather_queries(AttentionScratch<W>& a, const HeadShape& s, const SequenceView& seq, int kv_head, int first, int count,
                              const typename InputOf<W>::Type* queries, long stride, QueryRows<W>& rows) {
  rows.count = count;
  for (int r = 0; r < count; r++) {
    int row = first + r, token = row / s.group(), head = kv_head * s.group() + row % s.group();
    rows.positions[r] = seq.first_position + token;
    rows.tokens[r] = seq.first_row + token, rows.heads[r] = head;
    const typename InputOf<W>::Type* from = queries + rows.tokens[r] * stride + head * s.padded();
    memcpy((void*)(a.queries + r * s.padded()), from, s.padded() * sizeof *from);
#ifdef HF_TILES
    if constexpr (sizeof(typename InputOf<W>::Type) == 4)
#endif
      for (int j = 0; j < s.padded(); j += 16) store(a.query_floats + r * s.padded() + j, load(from + j));
  }
}

}  // namespace
