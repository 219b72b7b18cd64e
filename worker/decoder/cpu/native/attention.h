// Attention straight from the pages of the KV cache, in tiles of 64 keys from position 0.
//
// A row is a token and a query head. What it computes depends on its own position alone: the tiles
// start at fixed positions, a tile that it does not see leaves it as it is, and contexts longer than `SPLIT` keys are
// cut at fixed places, each part summed by itself (by any thread) and merged in order.
#pragma once
#include "pages.h"

namespace {

enum { KEYS = 64, QUERY_ROWS = 64, SPLIT = 1024 };

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
  alignas(64) W joined[KEYS / 32][MAX_HEAD / 16][TILE];
};

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

// Where the keys of one tile of 64 lie: found once, for all rows.
template <class W> struct TileOfKeys {
  int num_tiles;  // of 16
  const W* keys[KEYS / 16];
};
template <class W>
HF_INLINE TileOfKeys<W> find_keys(const Pages<W>& pages, const SequenceView& seq, int kv_head, int key, int num_keys) {
  TileOfKeys<W> found;
  found.num_tiles = (num_keys + 15) / 16;
  for (int b = 0; b < found.num_tiles; b++) found.keys[b] = key_tile(pages, seq, kv_head, key + 16 * b);
  return found;
}

#ifdef HF_TILES
// Scores of up to 16 rows: four tiles of keys side by side.
HF_INLINE void score_16(Tiles& t, const Bf16* queries, int padded, const TileOfKeys<Bf16>& k, float* scores) {
  tile_zero<0>(t), tile_zero<1>(t), tile_zero<2>(t), tile_zero<3>(t);
  for (int d = 0; d < padded / 32; d++) {
    tile_load<4>(t, queries + d * 32, padded * 2);
    tile_load<6>(t, k.keys[0] + d * TILE, 64), tile_product<0, 4, 6>(t);
    if (k.num_tiles > 1) tile_load<7>(t, k.keys[1] + d * TILE, 64), tile_product<1, 4, 7>(t);
    if (k.num_tiles > 2) tile_load<6>(t, k.keys[2] + d * TILE, 64), tile_product<2, 4, 6>(t);
    if (k.num_tiles > 3) tile_load<7>(t, k.keys[3] + d * TILE, 64), tile_product<3, 4, 7>(t);
  }
  tile_store<0>(t, scores, KEYS * 4), tile_store<1>(t, scores + 16, KEYS * 4);
  tile_store<2>(t, scores + 32, KEYS * 4), tile_store<3>(t, scores + 48, KEYS * 4);
}
// Scores of 32 rows: two by two tiles. Those of keys that do not exist are nobody's.
HF_INLINE void score_32(Tiles& t, const Bf16* queries, int padded, const TileOfKeys<Bf16>& k, float* scores) {
  for (int b = 0; b < k.num_tiles; b += 2, scores += 32) {
    const Bf16 *left = k.keys[b], *right = b + 1 < k.num_tiles ? k.keys[b + 1] : left;
    tile_zero<0>(t), tile_zero<1>(t), tile_zero<2>(t), tile_zero<3>(t);
    for (int d = 0; d < padded / 32; d++) {
      tile_load<6>(t, left + d * TILE, 64), tile_load<4>(t, queries + d * 32, padded * 2), tile_product<0, 4, 6>(t);
      tile_load<7>(t, right + d * TILE, 64), tile_load<5>(t, queries + 16 * padded + d * 32, padded * 2);
      tile_product<1, 4, 7>(t), tile_product<2, 5, 6>(t), tile_product<3, 5, 7>(t);
    }
    tile_store<0>(t, scores, KEYS * 4), tile_store<1>(t, scores + 16, KEYS * 4);
    tile_store<2>(t, scores + 16 * KEYS, KEYS * 4), tile_store<3>(t, scores + 16 * KEYS + 16, KEYS * 4);
  }
}
template <class Value>
HF_INLINE void add_values_16(Tiles& t, const Bf16* weights, int num_spans, int value_tiles, float* values,
                             Value&& value) {
  int dims = value_tiles * 16;
  for (int v = 0; v < value_tiles; v += 4) {
    int some = value_tiles - v < 4 ? value_tiles - v : 4;
    float* out = values + v * 16;
    tile_load<0>(t, out, dims * 4);
    if (some > 1) tile_load<1>(t, out + 16, dims * 4);
    if (some > 2) tile_load<2>(t, out + 32, dims * 4);
    if (some > 3) tile_load<3>(t, out + 48, dims * 4);
    for (int s = 0; s < num_spans; s++) {
      tile_load<4>(t, weights + 32 * s, KEYS * 2);
      tile_load<6>(t, value(s, v + 0), 64), tile_product<0, 4, 6>(t);
      if (some > 1) tile_load<7>(t, value(s, v + 1), 64), tile_product<1, 4, 7>(t);
      if (some > 2) tile_load<6>(t, value(s, v + 2), 64), tile_product<2, 4, 6>(t);
      if (some > 3) tile_load<7>(t, value(s, v + 3), 64), tile_product<3, 4, 7>(t);
    }
    tile_store<0>(t, out, dims * 4);
    if (some > 1) tile_store<1>(t, out + 16, dims * 4);
    if (some > 2) tile_store<2>(t, out + 32, dims * 4);
    if (some > 3) tile_store<3>(t, out + 48, dims * 4);
  }
}
template <class Value>
HF_INLINE void add_values_32(Tiles& t, const Bf16* weights, int num_spans, int value_tiles, float* values,
                             Value&& value) {
  int dims = value_tiles * 16;
  for (int v = 0; v < value_tiles; v += 2) {
    bool two = v + 1 < value_tiles;
    float *out = values + v * 16, *lower = out + 16 * dims;
    tile_load<0>(t, out, dims * 4), tile_load<2>(t, lower, dims * 4);
    if (two) tile_load<1>(t, out + 16, dims * 4), tile_load<3>(t, lower + 16, dims * 4);
    for (int s = 0; s < num_spans; s++) {
      tile_load<6>(t, value(s, v), 64), tile_load<4>(t, weights + 32 * s, KEYS * 2), tile_product<0, 4, 6>(t);
      tile_load<5>(t, weights + 16 * KEYS + 32 * s, KEYS * 2), tile_product<2, 5, 6>(t);
      if (two) tile_load<7>(t, value(s, v + 1), 64), tile_product<1, 4, 7>(t), tile_product<3, 5, 7>(t);
    }
    tile_store<0>(t, out, dims * 4), tile_store<2>(t, lower, dims * 4);
    if (two) tile_store<1>(t, out + 16, dims * 4), tile_store<3>(t, lower + 16, dims * 4);
  }
}
// Rows [first, count) in tiles: two at a time. Where there are more than 16, tiles are whole, and rows behind the last one are
// nobody's; they have room.
template <class One, class Two> HF_INLINE void row_tiles(Tiles& t, int first, int count, One&& one, Two&& two) {
  int shape = count < 16 ? count : 16;
  shape_tiles(t, shape, shape);
  for (; count - first > 16; first += 32) two(first);
  if (first < count) one(first);
}
#endif

// Scores [rows][64] of rows [first, count) with a tile of keys.
template <class W>
HF_INLINE void score_rows(Tiles& t, AttentionScratch<W>& a, const HeadShape& s, const TileOfKeys<W>& k, int first,
                          int count) {
  int padded = s.padded();
#ifdef HF_TILES
  if constexpr (sizeof(W) == 2 && sizeof(typename InputOf<W>::Type) == 2)
    return row_tiles(
        t, first, count, [&](int row) { score_16(t, a.queries + row * padded, padded, k, a.scores + row * KEYS); },
        [&](int row) { score_32(t, a.queries + row * padded, padded, k, a.scores + row * KEYS); });
#endif
  const float* rows = a.query_floats + first * padded;
  for (int b = 0; b < k.num_tiles; b++) {
    float* scores = a.scores + first * KEYS + 16 * b;
    fma_tile<W, false>(rows, padded, count - first, k.keys[b], scores, KEYS);
    for (int d = 1; d < s.key_tiles; d++)
      fma_tile<W, true>(rows + d * 32, padded, count - first, k.keys[b] + d * TILE, scores, KEYS);
  }
}

// values [rows][dims] += weights [rows][64] times a tile's values, for rows [first, count). `value(s, v)`: tile v of span s.
template <class W, class Value>
HF_INLINE void add_values(Tiles& t, AttentionScratch<W>& a, const HeadShape& s, int num_spans, float* values, int first,
                          int count, Value&& value) {
  int dims = s.value_dims();
#ifdef HF_TILES
  if constexpr (sizeof(W) == 2 && sizeof(typename InputOf<W>::Type) == 2)
    return row_tiles(
        t, first, count,
        [&](int row) {
          add_values_16(t, a.weights + row * KEYS, num_spans, s.value_tiles, values + row * dims, value);
        },
        [&](int row) {
          add_values_32(t, a.weights + row * KEYS, num_spans, s.value_tiles, values + row * dims, value);
        });
#endif
  for (int span = 0; span < num_spans; span++)
    for (int v = 0; v < s.value_tiles; v++)
      fma_tile<W, true>(a.weight_floats + first * KEYS + 32 * span, KEYS, count - first, value(span, v),
                        values + first * dims + v * 16, dims);
}

// The keys that a query at `position` sees: [first, position].
HF_INLINE int first_key(const HeadShape& shape, int position) {
  return shape.window && position >= shape.window ? position - shape.window + 1 : 0;
}

// Turns the scores of one tile into weights for up to 16 rows, and scales what they have summed where a larger score came up.
template <class W>
HF_INLINE void weigh_rows(AttentionScratch<W>& a, const HeadShape& shape, const int* positions, Softmax& sum, int row,
                          int count, int key) {
  alignas(64) float factor[16];
  int firsts[16], ends[16];
  Lanes best[16], scale = all(shape.softcap > 0 ? 1.0f : shape.scale);
  for (int r = 0; r < count; r++) {
    best[r] = all(-INFINITY);
    int first = firsts[r] = first_key(shape, positions[r]) - key, end = ends[r] = positions[r] + 1 - key;
    if (end <= 0 || first >= KEYS) continue;
    float* scores = a.scores + (row + r) * KEYS;
    bool is_cut = first > 0 || end < KEYS;
    if (shape.softcap > 0 || is_cut)
      for (int j = 0; j < KEYS; j += 16) {
        Lanes s = load(scores + j);
        if (shape.softcap > 0) s = tanh_of(s * all(shape.cap_scale)) * all(shape.softcap);
        if (is_cut) s = keep_range(s, first - j, end - j, all(-INFINITY));
        store(scores + j, s);
      }
    for (int j = 0; j < KEYS; j += 16) best[r] = larger(best[r], load(scores + j));
  }
  Lanes before = load(sum.largest + row), now = larger(before, largest_of_each(best, count) * scale);
  store(sum.largest + row, now), store(factor, exp2_of(before - now));
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
      Lanes p = exp2_of(fma(load(a.scores + (row + r) * KEYS + j), scale, minus_largest));
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
  const HeadShape& shape = pages.shape;
  for (int r = 0; r < QUERY_ROWS; r++) sum.largest[r] = -INFINITY;
  memset(sum.sums, 0, count * 16 * 4);
  memset(sum.values, 0, (long)count * shape.value_dims() * 4);
  for (int key = from; key < to; key += KEYS) {
    int num_keys = to - key < KEYS ? to - key : KEYS;
    TileOfKeys<W> found = find_keys(pages, seq, kv_head, key, num_keys);
    int first = 0;  // the rows that see any of these keys: they are in order of position
    while (first + 16 < count && positions[first + 15] < key) first += 16;
    // One after the other for all rows: what was stored has arrived when it is loaded as a tile.
    score_rows(t, a, shape, found, first, count);
    for (int row = first; row < count; row += 16) {
      int some = count - row < 16 ? count - row : 16;
      weigh_rows(a, shape, positions + row, sum, row, some, key);
#ifdef HF_TILES
      if constexpr (sizeof(typename InputOf<W>::Type) == 4)
#endif
        widen_weights(a, row, some);
    }
    // Values of small blocks are put together: once for many rows, tile by tile where each is used once.
    int num_spans = (num_keys + 31) / 32;
    auto put_together = [&](int s, int v, W* joined) {
      return value_tile(pages, seq, kv_head, key + 32 * s, num_keys - 32 * s, v, joined);
    };
    if (count <= 16) {
      add_values(t, a, shape, num_spans, sum.values, first, count,
                 [&](int s, int v) { return put_together(s, v, a.joined[0][0]); });
      continue;
    }
    const W* values[KEYS / 32][MAX_HEAD / 16];
    for (int s = 0; s < num_spans; s++)
      for (int v = 0; v < shape.value_tiles; v++) values[s][v] = put_together(s, v, a.joined[s][v]);
    add_values(t, a, shape, num_spans, sum.values, first, count, [&](int s, int v) { return values[s][v]; });
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
HF_INLINE void gather_queries(AttentionScratch<W>& a, const HeadShape& s, const SequenceView& seq, int kv_head,
                              int first, int count, const typename InputOf<W>::Type* queries, long stride,
                              QueryRows<W>& rows) {
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
