// Compact weights, read: a tile of 512 bfloat16 numbers from its 768 bytes (`compact_order.h` says where they lie).
// What the numbers are multiplied with does not live here.
#pragma once
#include "compact_order.h"
#include "lanes.h"

namespace {

// Registers of bytes, and what is done with them.
#ifdef __AVX512F__
typedef __m512i Bytes;
NATIVE_INLINE Bytes bytes_load(const void* p) { return _mm512_loadu_si512(p); }
NATIVE_INLINE void bytes_store(void* p, Bytes a) { _mm512_storeu_si512(p, a); }
NATIVE_INLINE Bytes bytes_all(int x) { return _mm512_set1_epi8((char)x); }
NATIVE_INLINE Bytes bytes_and(Bytes a, Bytes b) { return _mm512_and_si512(a, b); }
NATIVE_INLINE Bytes upper_halves(Bytes a, Bytes low) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), low); }
NATIVE_INLINE Bytes table_of(__m128i table) { return _mm512_broadcast_i32x4(table); }
NATIVE_INLINE Bytes looked_up(Bytes table, Bytes places) { return _mm512_shuffle_epi8(table, places); }
NATIVE_INLINE Bytes first_words(Bytes low, Bytes high) { return _mm512_unpacklo_epi8(low, high); }
NATIVE_INLINE Bytes last_words(Bytes low, Bytes high) { return _mm512_unpackhi_epi8(low, high); }
#else
typedef __m256i Bytes;
NATIVE_INLINE Bytes bytes_load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
NATIVE_INLINE void bytes_store(void* p, Bytes a) { _mm256_storeu_si256((__m256i*)p, a); }
NATIVE_INLINE Bytes bytes_all(int x) { return _mm256_set1_epi8((char)x); }
NATIVE_INLINE Bytes bytes_and(Bytes a, Bytes b) { return _mm256_and_si256(a, b); }
NATIVE_INLINE Bytes upper_halves(Bytes a, Bytes low) { return _mm256_and_si256(_mm256_srli_epi16(a, 4), low); }
NATIVE_INLINE Bytes table_of(__m128i table) { return _mm256_broadcastsi128_si256(table); }
NATIVE_INLINE Bytes looked_up(Bytes table, Bytes places) { return _mm256_shuffle_epi8(table, places); }
NATIVE_INLINE Bytes first_words(Bytes low, Bytes high) { return _mm256_unpacklo_epi8(low, high); }
NATIVE_INLINE Bytes last_words(Bytes low, Bytes high) { return _mm256_unpackhi_epi8(low, high); }
#endif
enum { BYTES = sizeof(Bytes) };

// The high bytes that have a place.
struct HighBytes {
  Bytes table;
  NATIVE_INLINE_MEMBER explicit HighBytes(const CompactPanel& panel)
      : table(table_of(_mm_loadu_si128((const __m128i*)panel.high_bytes()))) {}
};

// The numbers of a register of low bytes of a block's half, as two registers of words, which are 32 words apart.
NATIVE_INLINE void read_half(const HighBytes& high_bytes, const uint8_t* low_bytes, Bytes places, Bytes (&words)[2]) {
  const Bytes low = bytes_load(low_bytes), high = looked_up(high_bytes.table, places);
  words[0] = first_words(low, high), words[1] = last_words(low, high);
}
NATIVE_INLINE void write_half(const HighBytes& high_bytes, const uint8_t* low_bytes, Bytes places, Bf16* out) {
  Bytes words[2];
  read_half(high_bytes, low_bytes, places, words);
  bytes_store(out, words[0]), bytes_store(out + 32, words[1]);
}

// The 128 numbers of a block.
NATIVE_INLINE void read_block(const HighBytes& high_bytes, const uint8_t* block, Bf16* out) {
  const Bytes lower = bytes_all(0x0f);
#pragma GCC unroll 2
  for (int p = 0; p < BLOCK; p += BYTES) {
    Bytes places = bytes_load(block + p);
    Bf16* words = out + word_of_byte(p);
    write_half(high_bytes, block + BLOCK + p, bytes_and(places, lower), words);
    write_half(high_bytes, block + 2 * BLOCK + p, upper_halves(places, lower), words + BLOCK);
  }
}
NATIVE_INLINE void fetch_block(const uint8_t* block) {
#pragma GCC unroll 3
  for (int line = 0; line < BLOCK_BYTES; line += 64) _mm_prefetch((const char*)block + line, _MM_HINT_T0);
}

NATIVE_INLINE bool has_rare(const CompactPanel& panel, int i) { return panel.starts()[i] != panel.starts()[i + 1]; }

// Gives the numbers of tile `i` whose high bytes have no place theirs.
inline void add_rare(const CompactPanel& panel, int i, Bf16* out) {
  for (int n = panel.starts()[i]; n < panel.starts()[i + 1]; n++) {
    const Rare rare = panel.rare()[n];
    out[rare.at].bits = (uint16_t)((out[rare.at].bits & 0xff) | rare.high << 8);
  }
}

// Tile `i` of a panel as it was. `AHEAD`: bytes by which tiles are fetched, or 0.
template <int AHEAD>
NATIVE_INLINE void read_tile(const CompactPanel& panel, const HighBytes& high_bytes, int i, Bf16* out) {
  const uint8_t* tile = panel.tile(i);
#pragma GCC unroll 4
  for (int b = 0; b < TILE_BLOCKS; b++) {
    const uint8_t* block = tile + b * BLOCK_BYTES;
    if (AHEAD) fetch_block(block + AHEAD);
    read_block(high_bytes, block, out + b * 2 * BLOCK);
  }
  if (__builtin_expect(has_rare(panel, i), 0)) add_rare(panel, i, out);
}

// Tiles [first, first + count) of a panel.
template <int AHEAD> NATIVE_INLINE void read_tiles(const CompactPanel& panel, int first, int count, Bf16* out) {
  const HighBytes high_bytes(panel);
  for (int i = 0; i < count; i++) read_tile<AHEAD>(panel, high_bytes, first + i, out + (long)i * TILE);
}

}  // namespace
