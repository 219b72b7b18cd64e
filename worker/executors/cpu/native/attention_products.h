// Products of attention: scores of up to 64 rows with 64 keys, and weights times their values.
//
// By tiles for bf16 where there are any, else by FMA: the same bits. Which keys a row sees and how scores become weights
// is in `attention.h`; where keys and values lie, in `pages.h`.
#pragma once
#include "pages.h"

namespace {

enum { KEYS = 64, QUERY_ROWS = 64 };

// What rows have summed so far: the largest score, the sum of powers (16 partial sums), and the weighted values.
struct Softmax {
  alignas(64) float largest[QUERY_ROWS];
  alignas(64) float sums[QUERY_ROWS * 16];
  alignas(64) float values[QUERY_ROWS * MAX_HEAD];
};

// What a thread attends with: of a model of W, whatever its keys and values are kept as.
template <class W> struct AttentionScratch {
  typedef typename InputOf<W>::Type Input;
  typedef typename FactorOf<W>::Type Factor;
  Softmax total, part;
  alignas(64) float scores[QUERY_ROWS * KEYS];
  alignas(64) Input weights[QUERY_ROWS * KEYS];
  alignas(64) Input queries[QUERY_ROWS * MAX_HEAD];
  alignas(64) Factor query_factors[QUERY_ROWS * MAX_HEAD];
  alignas(64) Factor weight_factors[QUERY_ROWS * KEYS];
  alignas(64) W joined[KEYS / 32][MAX_HEAD / 16][TILE];
  alignas(64) float widened[2 * MAX_HEAD / 32][TILE];  // keys or values of many rows, where products go by FMA
  // Where keys and values are kept as codes:
  TileScales scales;
  alignas(64) Code joined_codes[KEYS / 32][MAX_HEAD / 16][TILE];
  alignas(64) W read_keys[KEYS / 16][MAX_HEAD / 32][TILE];  // if products do not take codes

  W* room(const W*, int span, int tile) { return joined[span][tile]; }
  Code* room(const Code*, int span, int tile) { return joined_codes[span][tile]; }
};

// Where the keys of one tile of 64 lie: found once, for all rows.
template <class K> struct TileOfKeys {
  int num_tiles;  // of 16
  const K* keys[KEYS / 16];
};
template <class K>
NATIVE_INLINE TileOfKeys<K> find_keys(const Pages<K>& pages, const SequenceView& seq, int kv_head, int key,
                                      int num_keys) {
  TileOfKeys<K> found;
  found.num_tiles = (num_keys + 15) / 16;
  for (int b = 0; b < found.num_tiles; b++) found.keys[b] = key_tile(pages, seq, kv_head, key + 16 * b);
  return found;
}

#ifdef NATIVE_TILES
// Scores of up to 16 rows: four tiles of keys side by side.
NATIVE_INLINE void score_16(Tiles& t, const Bf16* queries, int padded, const TileOfKeys<Bf16>& k, float* scores) {
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
NATIVE_INLINE void score_32(Tiles& t, const Bf16* queries, int padded, const TileOfKeys<Bf16>& k, float* scores) {
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
NATIVE_INLINE void add_values_16(Tiles& t, const Bf16* weights, int num_spans, int value_tiles, float* values,
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
NATIVE_INLINE void add_values_32(Tiles& t, const Bf16* weights, int num_spans, int value_tiles, float* values,
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
template <class One, class Two> NATIVE_INLINE void row_tiles(Tiles& t, int first, int count, One&& one, Two&& two) {
  int shape = count < 16 ? count : 16;
  shape_tiles(t, shape, shape);
  for (; count - first > 16; first += 32) two(first);
  if (first < count) one(first);
}
#endif

// Whether tiles of K are factors as they lie, for rows of a model of W.
template <class W, class K> constexpr bool as_they_lie() {
  return std::is_same<W, K>::value && FactorOf<W>::AS_THEY_LIE;
}

// out [count][N * 16] (+)= rows times tiles that follow one another in each column. Many rows have them as factors once.
template <int N, class W, class K>
void add_fma(AttentionScratch<W>& a, const typename FactorOf<W>::Type* rows, long stride, int count,
             const Columns<K, N>& columns, int tiles, float* out, long out_stride, bool begun) {
  constexpr int C = N * 16 / WIDTH;
  if (count <= (as_they_lie<W, K>() ? (int)FMA_ROWS : (int)FEW_ROWS))
    return add_few<C>(rows, stride, count, columns, tiles, out, out_stride, begun);
  if constexpr (as_they_lie<W, K>()) add_many<C, true>(rows, stride, count, columns, tiles, out, out_stride, begun);
  else {
    Columns<float, N> widened;
    widened.step = TILE;
    for (int i = 0; i < N; i++) {
      widened.first[i] = a.widened[i * tiles];
      for (int k = 0; k < tiles; k++) widen_tile(columns.first[i] + k * TILE, a.widened[i * tiles + k]);
    }
    add_many<C, false>(rows, stride, count, widened, tiles, out, out_stride, begun);
  }
}
// So many columns of 16 are multiplied at once.
enum { COLUMNS_AT_ONCE = FMA_COLUMNS * WIDTH / 16 };

// Keys that are codes, as bfloat16. `next`: codes that are fetched meanwhile.
NATIVE_INLINE TileOfKeys<Bf16> read_keys(AttentionScratch<Bf16>& a, const HeadShape& s, const TileOfKeys<Code>& k,
                                         const TileOfKeys<Code>& next) {
  TileOfKeys<Bf16> read;
  read.num_tiles = k.num_tiles;
  for (int b = 0; b < k.num_tiles; b++) {
    for (int d = 0; d < s.key_tiles; d++) {
      if (b < next.num_tiles)
        for (int i = 0; i < TILE; i += 64) _mm_prefetch((const char*)(next.keys[b] + d * TILE + i), _MM_HINT_T0);
      to_bf16(k.keys[b] + d * TILE, a.read_keys[b][d]);
    }
    read.keys[b] = a.read_keys[b][0];
  }
  return read;
}

// Scores [rows][64] of rows [first, count) with a tile of keys, without their scales. `next`: of few rows, the keys that are
// fetched meanwhile.
template <class W, class K>
NATIVE_INLINE void score_rows(Tiles& t, AttentionScratch<W>& a, const HeadShape& s, const TileOfKeys<K>& k, int first,
                              int count, const TileOfKeys<K>& next) {
  int padded = s.padded();
#ifdef NATIVE_TILES
  if constexpr (sizeof(W) == 2 && sizeof(typename InputOf<W>::Type) == 2)
    return row_tiles(
        t, first, count, [&](int row) { score_16(t, a.queries + row * padded, padded, k, a.scores + row * KEYS); },
        [&](int row) { score_32(t, a.queries + row * padded, padded, k, a.scores + row * KEYS); });
#endif
  typedef typename FactorOf<W>::Type Factor;
  const long stride = factors_in<Factor>(padded);
  for (int b = 0; b < k.num_tiles; b += COLUMNS_AT_ONCE) {
    Columns<K, COLUMNS_AT_ONCE> keys;  // those that do not exist are nobody's
    keys.step = TILE;
    for (int i = 0; i < COLUMNS_AT_ONCE; i++) {
      keys.first[i] = k.keys[std::min(b + i, k.num_tiles - 1)];
      if (b + i < next.num_tiles) keys.fetch(i, next.keys[b + i]);
    }
    add_fma(a, a.query_factors + first * stride, stride, count - first, keys, s.key_tiles,
            a.scores + first * KEYS + 16 * b, KEYS, false);
  }
}

// values [rows][dims] += weights [rows][64] times a tile's values, for rows [first, count). `value(s, v)`: tile v of span s.
// `later(s, v)`: what is fetched meanwhile, or null.
template <class K, class W, class Value, class Later>
NATIVE_INLINE void add_values(Tiles& t, AttentionScratch<W>& a, const HeadShape& s, int num_spans, float* values,
                              int first, int count, Value&& value, Later&& later) {
  int dims = s.value_dims();
#ifdef NATIVE_TILES
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
  typedef typename FactorOf<W>::Type Factor;
  const long stride = factors_in<Factor>(KEYS), each = Factors<Factor>::PER_TILE;
  for (int span = 0; span < num_spans; span++) {
    const Factor* weights = a.weight_factors + first * stride + span * each;
    int v = 0;
    auto add = [&](auto&& tiles) {
      for (int i = 0; i < (int)(sizeof tiles.first / sizeof *tiles.first); i++)
        if (const void* at = later(span, v + i)) tiles.fetch(i, at);
      add_fma(a, weights, stride, count - first, tiles, 1, values + first * dims + v * 16, dims, true);
    };
    if (COLUMNS_AT_ONCE == 2)
      for (; v + 2 <= s.value_tiles; v += 2) add(Columns<K, 2>{{value(span, v), value(span, v + 1)}, TILE});
    for (; v < s.value_tiles; v++) add(Columns<K, 1>{{value(span, v)}, TILE});
  }
}

}  // namespace
