// Pages of the KV cache, as tiles: where keys and values lie, how they are written and read.
//
// A page belongs to one block and one KV head: keys [block / 16][dims / 32][a tile of 32 dims and 16 keys], then values
// [block / span][dims / 16][a tile of `span` keys and 16 dims], with spans of 32 keys, or 16 where blocks are that small (half a
// tile): tiles as they are multiplied (`tile_order.h`). They are of K: a model's dtype, or codes (`codes.h`), behind whose tiles
// lie scales, [block] float16 of keys, then of values. What is computed from them is in `attention.h`. Of latent attention
// values are the first dimensions of keys: there are no others, and tiles of values are turned from those of keys.
#pragma once
#include "codes.h"
#include "functions.h"
#include "linear.h"
#include "turned.h"

namespace {

enum { MAX_HEAD = 576, SUB_PAGE = 16 };  // dimensions of a key or a value; keys of a tile

struct HeadShape {
  int num_heads, num_kv_heads, key_dim, value_dim;
  int key_tiles, value_tiles;    // tiles of 32 and of 16 dimensions
  int block_size, span;          // keys of a page, and of a tile of its values
  int window;                    // keys that a query sees; 0: all
  int sees_behind = 0;           // it sees as many behind it
  int has_own_table = 0;         // its blocks are those of layers with a window
  long block_bytes = 0;          // from a block to the next; 0: blocks follow one another
  float scale = 0, softcap = 0;  // see `scale_scores`
  float cap_scale = 0;
  bool values_in_keys = false;  // the first `value_dim` dimensions
  int group() const { return num_heads / num_kv_heads; }
  int padded() const { return key_tiles * 32; }
  int value_dims() const { return value_tiles * 16; }
  long key_elements() const { return (long)block_size * padded(); }
  long page_elements() const { return key_elements() + (values_in_keys ? 0 : (long)block_size * value_dims()); }
  bool operator==(const HeadShape& o) const {
    return num_heads == o.num_heads && num_kv_heads == o.num_kv_heads && key_dim == o.key_dim &&
           value_dim == o.value_dim && block_size == o.block_size && window == o.window &&
           sees_behind == o.sees_behind && scale == o.scale && softcap == o.softcap &&
           values_in_keys == o.values_in_keys && has_own_table == o.has_own_table && block_bytes == o.block_bytes;
  }
};

NATIVE_INLINE HeadShape shape_of_heads(int num_heads, int num_kv_heads, int key_dim, int value_dim, int block_size,
                                       int window) {
  HeadShape s;
  s.num_heads = num_heads, s.num_kv_heads = num_kv_heads, s.key_dim = key_dim, s.value_dim = value_dim;
  s.key_tiles = (key_dim + 31) / 32, s.value_tiles = (value_dim + 15) / 16;
  s.block_size = block_size, s.span = block_size % 32 ? 16 : 32, s.window = window;
  return s;
}
// Scores are scaled in units of log2. `softcap` 0: none; otherwise they are capped to it by tanh, at `cap_scale`.
NATIVE_INLINE void scale_scores(HeadShape& s, float scaling, float softcap) {
  s.scale = scaling * LOG2_E;
  s.softcap = softcap > 0 ? softcap * LOG2_E : 0, s.cap_scale = softcap > 0 ? scaling / softcap : 0;
}

// One sequence of a step, as attention sees it. Its blocks in layers with a window are others where those have their own.
struct SequenceView {
  int first_row, first_position, num_tokens;
  const int *blocks, *window_blocks;
  int end;  // the position behind its last token in this step
};

template <class K> struct Pages {
  enum { HAS_SCALES = std::is_same<K, Code>::value };
  K* base;  // of this layer
  HeadShape shape;
  long page_length() const {
    return shape.page_elements() + (HAS_SCALES ? 2 * shape.block_size * (long)(sizeof(Half) / sizeof(Code)) : 0);
  }
  long block_length() const {
    return shape.block_bytes ? shape.block_bytes / (long)sizeof(K) : shape.num_kv_heads * page_length();
  }
  // The page that holds a position.
  K* at(const SequenceView& seq, int position, int kv_head) const {
    const int* blocks = shape.has_own_table ? seq.window_blocks : seq.blocks;
    return base + blocks[position / shape.block_size] * block_length() + kv_head * page_length();
  }
  // Of the key and of the value at a position, and those that follow in its block.
  Half* key_scales(const SequenceView& seq, int position, int kv_head) const {
    return (Half*)(at(seq, position, kv_head) + shape.page_elements()) + position % shape.block_size;
  }
  Half* value_scales(const SequenceView& seq, int position, int kv_head) const {
    return key_scales(seq, position, kv_head) + shape.block_size;
  }
};

// The tile of 16 keys (a sub-page) at position `key`, dimensions 32 * d onwards.
template <class K>
NATIVE_INLINE const K* key_tile(const Pages<K>& pages, const SequenceView& seq, int kv_head, int key) {
  int in_block = key % pages.shape.block_size;
  return pages.at(seq, key, kv_head) + (long)in_block / SUB_PAGE * pages.shape.key_tiles * TILE;
}
template <class K>
NATIVE_INLINE const K* value_span(const Pages<K>& pages, const SequenceView& seq, int kv_head, int key) {
  const HeadShape& s = pages.shape;
  int in_block = key % s.block_size;
  return pages.at(seq, key, kv_head) + s.key_elements() + (long)in_block / s.span * s.span * s.value_dims();
}
// As `value_tile`, of values that are dimensions of keys.
template <class K>
NATIVE_INLINE const K* turned_tile(const Pages<K>& pages, const SequenceView& seq, int kv_head, int key, int num_keys,
                                   int dims, K* turned) {
  const long from = (long)dims / 2 * TILE + dims % 2 * (TILE / 2);
  turn_half(key_tile(pages, seq, kv_head, key) + from, turned);
  if (num_keys > 16) turn_half(key_tile(pages, seq, kv_head, key + 16) + from, turned + TILE / 2);
  else memset((void*)(turned + TILE / 2), 0, TILE / 2 * sizeof(K));
  return turned;
}
// The values of 32 keys from `key` on, 16 dimensions: a tile. Two spans of 16 are put together; `num_keys` of them exist.
template <class K>
NATIVE_INLINE const K* value_tile(const Pages<K>& pages, const SequenceView& seq, int kv_head, int key, int num_keys,
                                  int dims, K* joined) {
  if (pages.shape.values_in_keys) return turned_tile(pages, seq, kv_head, key, num_keys, dims, joined);
  const K* first = value_span(pages, seq, kv_head, key) + (long)dims * pages.shape.span * 16;
  if (pages.shape.span == 32) return first;
  memcpy(joined, first, TILE / 2 * sizeof(K));
  if (num_keys > 16)
    memcpy(joined + TILE / 2, value_span(pages, seq, kv_head, key + 16) + (long)dims * 16 * 16, TILE / 2 * sizeof(K));
  else memset((void*)(joined + TILE / 2), 0, TILE / 2 * sizeof(K));
  return joined;
}

// Of the values of 32 keys from `key` on, of which `num_keys` exist, as many bytes as a tile: together, all of them, in the
// order in which they lie. Null: there are no such keys.
template <class K>
NATIVE_INLINE const void* value_bytes(const Pages<K>& pages, const SequenceView& seq, int kv_head, int key,
                                      int num_keys, int tile) {
  const HeadShape& s = pages.shape;
  if (s.values_in_keys) return nullptr;
  const long at = (long)tile * TILE, of_span = (long)s.span * s.value_dims();
  const int first = (int)(at / of_span) * s.span;
  return first < num_keys ? value_span(pages, seq, kv_head, key + first) + at % of_span : nullptr;
}

// Zeros for what lies behind the tokens of spans that this step begins: masked keys never bring in another's NaN.
template <class K> void clear_begun(const Pages<K>& pages, const SequenceView& seq, int kv_head, int first, int end) {
  const HeadShape& s = pages.shape;
  for (int p = (first + SUB_PAGE - 1) / SUB_PAGE * SUB_PAGE; p < end; p += SUB_PAGE) {
    if (p + SUB_PAGE <= end) continue;
    memset((void*)(pages.at(seq, p, kv_head) + p % s.block_size / SUB_PAGE * s.key_tiles * TILE), 0,
           s.key_tiles * TILE * sizeof(K));
    if (Pages<K>::HAS_SCALES) memset((void*)pages.key_scales(seq, p, kv_head), 0, SUB_PAGE * sizeof(Half));
  }
  for (int p = (first + s.span - 1) / s.span * s.span; p < end && !s.values_in_keys; p += s.span) {
    if (p + s.span <= end) continue;
    K* values = pages.at(seq, p, kv_head) + s.key_elements();
    memset((void*)(values + (long)(p % s.block_size) * s.value_dims()), 0, (long)s.span * s.value_dims() * sizeof(K));
    if (Pages<K>::HAS_SCALES) memset((void*)pages.value_scales(seq, p, kv_head), 0, s.span * sizeof(Half));
  }
}
// One input of 16 outputs of a tile: two apart, or side by side in float32 and as codes.
template <class K> NATIVE_INLINE void store_outputs(K* at, const K* numbers) { store_apart(at, numbers); }
NATIVE_INLINE void store_outputs(float* at, const float* numbers) { store(at, load(numbers)); }
NATIVE_INLINE void store_outputs(Code* at, const Code* numbers) { memcpy((void*)at, numbers, 16); }
// A key [padded], zeros behind its dimensions.
template <class K>
void put_key(const Pages<K>& pages, const SequenceView& seq, int kv_head, int position, const K* numbers) {
  const HeadShape& s = pages.shape;
  K* tiles = pages.at(seq, position, kv_head) + position % s.block_size / SUB_PAGE * s.key_tiles * TILE;
  int key = position % SUB_PAGE;
  for (int d = 0; d < s.padded(); d++) tiles[d / 32 * TILE + place<K>(d % 32, key)] = numbers[d];
}
// A value [value_dims()], zeros behind its dimensions.
template <class K>
void put_value(const Pages<K>& pages, const SequenceView& seq, int kv_head, int position, const K* numbers) {
  const HeadShape& s = pages.shape;
  K* span = pages.at(seq, position, kv_head) + s.key_elements() +
            (long)(position % s.block_size / s.span) * s.span * s.value_dims();
  int key = position % s.span;
  for (int d = 0; d < s.value_dims(); d += 16, span += (long)s.span * 16)
    store_outputs(span + place<K>(key, 0), numbers + d);
}
// The same of float32 numbers, which are rounded: a key [padded], and a value whose dimensions alone are there.
template <class K>
void write_key(const Pages<K>& pages, const SequenceView& seq, int kv_head, int position, const float* k) {
  K rounded[MAX_HEAD];
  if constexpr (Pages<K>::HAS_SCALES)
    *pages.key_scales(seq, position, kv_head) = to_codes(k, pages.shape.padded(), rounded);
  else
    for (int j = 0; j < pages.shape.padded(); j += 16) store(rounded + j, load(k + j));
  put_key(pages, seq, kv_head, position, rounded);
}
template <class K>
void write_value(const Pages<K>& pages, const SequenceView& seq, int kv_head, int position, const float* from) {
  const HeadShape& s = pages.shape;
  K rounded[MAX_HEAD];
  if constexpr (Pages<K>::HAS_SCALES) {
    float filled[MAX_HEAD];
    for (int j = 0; j < s.value_dims(); j += 16) store(filled + j, tail_of(from + j, s.value_dim - j));
    *pages.value_scales(seq, position, kv_head) = to_codes(filled, s.value_dims(), rounded);
  } else
    for (int j = 0; j < s.value_dims(); j += 16) store(rounded + j, tail_of(from + j, s.value_dim - j));
  put_value(pages, seq, kv_head, position, rounded);
}

// The scales of 64 keys and their values from position `key` on, in float32: of those in tiles of which `num_keys` exist.
// Zeros for the others.
struct TileScales {
  alignas(64) float keys[64], values[64];
};
NATIVE_INLINE void read_scales(const Pages<Code>& pages, const SequenceView& seq, int kv_head, int key, int num_keys,
                               TileScales& out) {
  for (int j = 0; j < 64; j += SUB_PAGE) {
    const bool is_there = j < num_keys;
    store(out.keys + j, is_there ? load(pages.key_scales(seq, key + j, kv_head)) : zero());
    store(out.values + j, is_there ? load(pages.value_scales(seq, key + j, kv_head)) : zero());
  }
}

}  // namespace
