// Attention straight from the pages of the KV cache, in tiles of 64 keys from position 0.
//
// A row is a token and a query head. What it computes depends on its own position alone: the tiles
// start at fixed positions, a tile that it does not see leaves it as it is, and contexts longer than `SPLIT` keys are
// cut at fixed places, each part summed by itself (by any thread) and merged in order.
#pragma once
#include "attention_products.h"

namespace {

enum { SPLIT = 1024, FEW_QUERIES = 16 };  // rows of a task that wait for memory rather than for products

// The keys that a query at `position` sees: from the first one up to the end.
NATIVE_INLINE int first_key(const HeadShape& shape, int position) {
  return shape.window && position >= shape.window ? position - shape.window + 1 : 0;
}

NATIVE_INLINE int end_of_keys(const HeadShape& shape, const SequenceView& seq, int position) {
  if (!shape.sees_behind) return position + 1;
  return shape.window ? std::min(position + shape.window, seq.end) : seq.end;
}

// The rows of one task: heads of one KV head, token by token, in order of position. Each sees the keys [first, end).
struct QueryRows {
  int count;
  int firsts[QUERY_ROWS], ends[QUERY_ROWS], tokens[QUERY_ROWS], heads[QUERY_ROWS];
};

// 16 weights from `at` on, rounded, as the product with values takes them.
template <class W> NATIVE_INLINE void store_weights(AttentionScratch<W>& a, int at, Lanes weights) {
#ifdef NATIVE_TILES
  if constexpr (sizeof(typename InputOf<W>::Type) == 2) return store(a.weights + at, weights);
#endif
  typename InputOf<W>::Type rounded[16];
  store(rounded, weights);
  store_factors(a.weight_factors + factors_in<typename FactorOf<W>::Type>(at), rounded);
}

// Turns the scores of one tile into weights for up to 16 rows, and scales what they have summed where a larger score came up.
// With SCALES, those of keys and of values (`a.scales`) are multiplied in: weights sum to what they do without.
template <bool SCALES, class W>
NATIVE_INLINE void weigh_rows(AttentionScratch<W>& a, const HeadShape& shape, const QueryRows& rows, Softmax& sum,
                              int row, int count, int key) {
  alignas(64) float factor[16];
  int firsts[16], ends[16];
  Lanes best[16], scale = all(shape.softcap > 0 ? 1.0f : shape.scale);
  for (int r = 0; r < count; r++) {
    best[r] = all(-INFINITY);
    int first = firsts[r] = rows.firsts[row + r] - key, end = ends[r] = rows.ends[row + r] - key;
    if (end <= 0 || first >= KEYS) continue;
    float* scores = a.scores + (row + r) * KEYS;
    bool is_cut = first > 0 || end < KEYS;
    if (SCALES || shape.softcap > 0 || is_cut)
      for (int j = 0; j < KEYS; j += 16) {
        Lanes s = load(scores + j);
        if (SCALES) s = s * load(a.scales.keys + j);
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
    int weights = (row + r) * KEYS;
    if (ends[r] <= 0 || firsts[r] >= KEYS) {
      for (int j = 0; j < KEYS; j += 16) store_weights(a, weights + j, zero());
      continue;
    }
    Lanes minus_largest = all(-sum.largest[row + r]);
    Lanes total = load(sum.sums + (row + r) * 16) * all(factor[r]);
    for (int j = 0; j < KEYS; j += 16) {
      Lanes p = exp2_of(fma(load(a.scores + (row + r) * KEYS + j), scale, minus_largest));
      total = total + p;
      store_weights(a, weights + j, SCALES ? p * load(a.scales.values + j) : p);
    }
    store(sum.sums + (row + r) * 16, total);
    if (factor[r] != 1.0f)
      for (int j = 0; j < dims; j += 16) {
        float* v = sum.values + (row + r) * dims + j;
        store(v, load(v) * all(factor[r]));
      }
  }
}

// Keys of a sequence for one KV head, from a multiple of 64 on. No sequence: it is not known which.
struct SomeKeys {
  const SequenceView* seq;
  int kv_head, first, end;
};

// Adds the keys [from, to) to what rows have summed. `to` is beyond no row's context but the longest's. `after`: the
// keys that this thread likely attends to next, of which it fetches the first 64 while it attends to its last.
template <class W, class K>
void attend_keys(Tiles& t, AttentionScratch<W>& a, const Pages<K>& pages, const SequenceView& seq, int kv_head,
                 const QueryRows& rows, int from, int to, Softmax& sum, SomeKeys after) {
  typedef typename ReadAs<W, K>::Type Read;  // what products take
  const HeadShape& shape = pages.shape;
  const int count = rows.count;
  for (int r = 0; r < QUERY_ROWS; r++) sum.largest[r] = -INFINITY;
  memset(sum.sums, 0, count * 16 * 4);
  memset(sum.values, 0, (long)count * shape.value_dims() * 4);
  for (int key = from; key < to; key += KEYS) {
    int num_keys = to - key < KEYS ? to - key : KEYS;
    TileOfKeys<K> found = find_keys(pages, seq, kv_head, key, num_keys);
    const SomeKeys next = key + KEYS < to ? SomeKeys{&seq, kv_head, key + KEYS, to} : after;
    const int num_next = next.seq && count <= FEW_QUERIES ? std::min((int)KEYS, next.end - next.first) : 0;
    TileOfKeys<K> coming = {};
    if (num_next > 0) coming = find_keys(pages, *next.seq, next.kv_head, next.first, num_next);
    int first = 0;  // the rows that see any of these keys: they are in order of position
    while (first + 16 < count && rows.ends[first + 15] <= key) first += 16;
    // One after the other for all rows: what was stored has arrived when it is loaded as a tile.
    if constexpr (std::is_same<Read, K>::value) score_rows(t, a, shape, found, first, count, coming);
    else score_rows<W, Read>(t, a, shape, read_keys(a, shape, found, coming), first, count, {});
    if constexpr (Pages<K>::HAS_SCALES) read_scales(pages, seq, kv_head, key, num_keys, a.scales);
    for (int row = first; row < count; row += 16) {
      int some = count - row < 16 ? count - row : 16;
      weigh_rows<Pages<K>::HAS_SCALES>(a, shape, rows, sum, row, some, key);
    }
    // Values of small blocks are put together: once for many rows, two tiles at a time where each is used once.
    int num_spans = (num_keys + 31) / 32;
    auto put_together = [&](int s, int v, int span, int tile) -> const Read* {
      const K* found = value_tile(pages, seq, kv_head, key + 32 * s, num_keys - 32 * s, v, a.room((K*)0, span, tile));
      if constexpr (std::is_same<Read, K>::value) return found;
      else return to_bf16(found, a.joined[span][tile]), a.joined[span][tile];
    };
    if (count <= FEW_QUERIES) {
      add_values<Read>(
          t, a, shape, num_spans, sum.values, first, count, [&](int s, int v) { return put_together(s, v, 0, v % 2); },
          [&](int s, int v) {
            return num_next > 32 * s
                       ? value_bytes(pages, *next.seq, next.kv_head, next.first + 32 * s, num_next - 32 * s, v)
                       : nullptr;
          });
      continue;
    }
    const Read* values[KEYS / 32][MAX_HEAD / 16];
    for (int s = 0; s < num_spans; s++)
      for (int v = 0; v < shape.value_tiles; v++) values[s][v] = put_together(s, v, s, v);
    add_values<Read>(
        t, a, shape, num_spans, sum.values, first, count, [&](int s, int v) { return values[s][v]; },
        [](int, int) { return nullptr; });
  }
}

// Adds the sums of further keys, or of a sink, to a row's. A row that has seen none of them stays as it is.
NATIVE_INLINE void merge_row(float* largest, float* sums, float* values, float other_largest, const float* other_sums,
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

NATIVE_INLINE void add_sink(float* largest, float* sums, float* values, float sink, int dims) {
  alignas(64) float one[16] = {1.0f}, nothing[MAX_HEAD] = {};
  merge_row(largest, sums, values, sink * LOG2_E, one, nothing, dims);
}

// The sums of further keys, for `count` rows.
NATIVE_INLINE void merge_all(const HeadShape& s, Softmax& total, const Softmax& part, int count) {
  int dims = s.value_dims();
  for (int r = 0; r < count; r++)
    merge_row(total.largest + r, total.sums + r * 16, total.values + r * dims, part.largest[r], part.sums + r * 16,
              part.values + r * dims, dims);
}

// Of one layer and step: queries [token][head][dims] and the place of the results; `dims`: that are there, up to padded().
template <class W> struct LayerRows {
  typedef typename InputOf<W>::Type Input;
  const Input* queries;
  long token_stride, head_stride;
  int dims;
  Input* out;  // [token], each with slices of `slice_length`, in which `heads_per_slice` heads follow one another
  long out_stride, slice_length;
  int heads_per_slice;
  const float* sinks;  // [head], or null
  const float* gates;  // [token], each [head][value dimension], or null: by whose sigmoid the results are multiplied
  long gates_stride;
};

// A multiple of 16 numbers, by registers: few of them take longer to ask the library for.
template <class T> NATIVE_INLINE void copy_numbers(T* to, const T* from, int count) {
  for (int i = 0; i < count; i += 16) memcpy((void*)(to + i), from + i, 16 * sizeof(T));
}

template <class W>
NATIVE_INLINE void gather_queries(AttentionScratch<W>& a, const HeadShape& s, const SequenceView& seq, int kv_head,
                                  int first, int count, const LayerRows<W>& layer, QueryRows& rows) {
  typedef typename InputOf<W>::Type Input;
  rows.count = count;
  for (int r = 0; r < count; r++) {
    int row = first + r, token = row / s.group(), head = kv_head * s.group() + row % s.group();
    const int position = seq.first_position + token;
    rows.firsts[r] = first_key(s, position), rows.ends[r] = end_of_keys(s, seq, position);
    rows.tokens[r] = seq.first_row + token, rows.heads[r] = head;
    Input* to = a.queries + r * s.padded();
    const Input* from = layer.queries + rows.tokens[r] * layer.token_stride + head * layer.head_stride;
    if (layer.dims == s.padded()) copy_numbers(to, from, layer.dims);
    else {
      memcpy((void*)to, from, layer.dims * sizeof(Input));
      memset((void*)(to + layer.dims), 0, (s.padded() - layer.dims) * sizeof(Input));
    }
#ifdef NATIVE_TILES
    if constexpr (sizeof(Input) == 4)
#endif
      for (int j = 0; j < s.padded(); j += 16)
        store_factors(a.query_factors + factors_in<typename FactorOf<W>::Type>(r * s.padded() + j), to + j);
  }
}

// The results of rows: what they have summed over all keys, and their sinks.
template <class W>
NATIVE_INLINE void write_results(const HeadShape& s, const QueryRows& rows, Softmax& sum, const LayerRows<W>& layer) {
  int dims = s.value_dims();
  for (int r = 0; r < rows.count; r++) {
    int head = rows.heads[r];
    float *largest = sum.largest + r, *sums = sum.sums + r * 16, *values = sum.values + (long)r * dims;
    if (layer.sinks) add_sink(largest, sums, values, layer.sinks[head], dims);
    Lanes inverse = all(1.0f / sum_of(load(sums)));
    typename InputOf<W>::Type rounded[MAX_HEAD];
    const float* gates = layer.gates ? layer.gates + rows.tokens[r] * layer.gates_stride + head * s.value_dim : nullptr;
    for (int j = 0; j < dims; j += 16) {
      Lanes v = load(values + j) * inverse;
      store(rounded + j, gates ? v * sigmoid_of(load(gates + j)) : v);
    }
    typename InputOf<W>::Type* out = layer.out + rows.tokens[r] * layer.out_stride +
                                     head / layer.heads_per_slice * layer.slice_length +
                                     head % layer.heads_per_slice * s.value_dim;
    if (s.value_dim == dims) copy_numbers(out, rounded, dims);
    else memcpy((void*)out, rounded, s.value_dim * sizeof *out);
  }
}

}  // namespace
