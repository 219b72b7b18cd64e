// Compact weights, read: a tile of 512 bfloat16 numbers from its 768 bytes (`compact_order.h` says where they lie).
// What the numbers are multiplied with does not live here.
#pragma once
#include "compact_order.h"
#include "lanes.h"

namespace {

// Registers of bytes, and what is done with them.
#ifdef __AVX512F__
typedef __m512i Bytes;
HF_INLINE Bytes bytes_load(const void* p) { return _mm512_loadu_si512(p); }
HF_INLINE void bytes_store(void* p, Bytes a) { _mm512_storeu_si512(p, a); }
HF_INLINE Bytes bytes_all(int x) { return _mm512_set1_epi8((char)x); }
HF_INLINE Bytes bytes_and(Bytes a, Bytes b) { return _mm512_and_si512(a, b); }
HF_INLINE Bytes upper_halves(Bytes a, Bytes low) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), low); }
HF_INLINE Bytes table_of(__m128i table) { return _mm512_broadcast_i32x4(table); }
HF_INLINE Bytes looked_up(Bytes table, Bytes places) { return _mm512_shuffle_epi8(table, places); }
// Bits of a where the mask has them, and all of b.
HF_INLINE Bytes with_bits(Bytes a, Bytes mask, Bytes b) { return _mm512_ternarylogic_epi32(a, mask, b, 0xea); }
HF_INLINE Bytes first_words(Bytes low, Bytes high) { return _mm512_unpacklo_epi8(low, high); }
HF_INLINE Bytes last_words(Bytes low, Bytes high) { return _mm512_unpackhi_epi8(low, high); }
#else
typedef __m256i Bytes;
HF_INLINE Bytes bytes_load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
HF_INLINE void bytes_store(void* p, Bytes a) { _mm256_storeu_si256((__m256i*)p, a); }
HF_INLINE Bytes bytes_all(int x) { return _mm256_set1_epi8((char)x); }
HF_INLINE Bytes bytes_and(Bytes a, Bytes b) { return _mm256_and_si256(a, b); }
HF_INLINE Bytes upper_halves(Bytes a, Bytes low) { return _mm256_and_si256(_mm256_srli_epi16(a, 4), low); }
HF_INLINE Bytes table_of(__m128i table) { return _mm256_broadcastsi128_si256(table); }
HF_INLINE Bytes looked_up(Bytes table, Bytes places) { return _mm256_shuffle_epi8(table, places); }
HF_INLINE Bytes with_bits(Bytes a, Bytes mask, Bytes b) { return _mm256_or_si256(_mm256_and_si256(a, mask), b); }
HF_INLINE Bytes first_words(Bytes low, Bytes high) { return _mm256_unpacklo_epi8(low, high); }
HF_INLINE Bytes last_words(Bytes low, Bytes high) { return _mm256_unpackhi_epi8(low, high); }
#endif
enum { BYTES = sizeof(Bytes) };

// Of a number's two bytes, what its exponent is of each: the upper seven bits in the high byte, the last one in the low byte.
struct ExponentTables {
  Bytes high, low;
  HF_INLINE_MEMBER explicit ExponentTables(const uint8_t* exponents) {
    __m128i all = _mm_loadu_si128((const __m128i*)exponents);
    high = table_of(_mm_and_si128(_mm_srli_epi16(all, 1), _mm_set1_epi8(0x7f)));
    low = table_of(_mm_and_si128(_mm_slli_epi16(all, 7), _mm_set1_epi8((char)0x80)));
  }
};

// The numbers of a register of bytes of a block's half, as two registers of words, which are 32 words apart.
HF_INLINE void read_half(const ExponentTables& tables, const uint8_t* bytes, Bytes places, Bytes (&words)[2]) {
  Bytes number = bytes_load(bytes);
  Bytes high = with_bits(number, bytes_all(0x80), looked_up(tables.high, places));
  Bytes low = with_bits(number, bytes_all(0x7f), looked_up(tables.low, places));
  words[0] = first_words(low, high), words[1] = last_words(low, high);
}
HF_INLINE void write_half(const ExponentTables& tables, const uint8_t* bytes, Bytes places, Bf16* out) {
  Bytes words[2];
  read_half(tables, bytes, places, words);
  bytes_store(out, words[0]), bytes_store(out + 32, words[1]);
}

// Asks for what is looked up of some tiles before they are read.
HF_INLINE void fetch_head(const CompactPanel& panel, int first, int tiles) {
  const char *starts = (const char*)(panel.starts() + first), *end = (const char*)(panel.starts() + first + tiles);
  _mm_prefetch(panel.at, _MM_HINT_T0), _mm_prefetch(starts, _MM_HINT_T0), _mm_prefetch(end, _MM_HINT_T0);
}

HF_INLINE bool has_rare(const CompactPanel& panel, int i) { return panel.starts()[i] != panel.starts()[i + 1]; }

// Gives the numbers of tile `i` whose exponents have no place theirs.
inline void add_rare(const CompactPanel& panel, int i, Bf16* out) {
  for (int n = panel.starts()[i]; n < panel.starts()[i + 1]; n++) {
    const Rare rare = panel.rare()[n];
    out[rare.at].bits = (uint16_t)((out[rare.at].bits & 0x807f) | rare.exponent << 7);
  }
}

// Tile `i` of a panel as it was. `AHEAD`: bytes by which tiles are fetched, or 0.
template <int AHEAD> HF_INLINE void read_tile(const CompactPanel& panel, const ExponentTables& tables, int i, Bf16* out) {
  const uint8_t* tile = panel.tile(i);
  const Bytes lower = bytes_all(0x0f);
#pragma GCC unroll 4
  for (int b = 0; b < TILE_BLOCKS; b++) {
    const uint8_t* block = tile + b * BLOCK_BYTES;
    for (int line = 0; AHEAD && line < BLOCK_BYTES; line += 64) _mm_prefetch((const char*)block + line + AHEAD, _MM_HINT_T0);
#pragma GCC unroll 2
    for (int p = 0; p < BLOCK; p += BYTES) {
      Bytes places = bytes_load(block + p);
      Bf16* words = out + b * 2 * BLOCK + word_of_byte(p);
      write_half(tables, block + BLOCK + p, bytes_and(places, lower), words);
      write_half(tables, block + 2 * BLOCK + p, upper_halves(places, lower), words + BLOCK);
    }
  }
  if (__builtin_expect(has_rare(panel, i), 0)) add_rare(panel, i, out);
}

// Tiles [first, first + count) of a panel.
template <int AHEAD> HF_INLINE void read_tiles(const CompactPanel& panel, int first, int count, Bf16* out) {
  const ExponentTables tables(panel.exponents());
  for (int i = 0; i < count; i++) read_tile<AHEAD>(panel, tables, first + i, out + (long)i * TILE);
}

}  // namespace
