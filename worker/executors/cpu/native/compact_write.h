// Compact weights, written: a panel of `compact_order.h`, tile by tile. Compiled for AVX2.
#pragma once
#include <immintrin.h>
#include <string.h>

#include <algorithm>

#include "compact_order.h"

namespace {

// Of an exponent only the upper seven bits are looked at.
enum { EXPONENTS = 128, CHOSEN = COMMON / 2, NO_PLACE = 255, COUNTS = 4 };

inline int exponent_of(uint16_t word) { return word >> 8 & 0x7f; }

// How often each exponent is among the numbers of a panel, by its upper seven bits. Several counts side by side: of equal
// numbers one would wait for the other.
struct ExponentCounts {
  uint32_t counts[COUNTS][EXPONENTS] = {};
  void add(const char* numbers, long count) {
    long i = 0;
    for (uint64_t four; i + 4 <= count; i += 4) {
      memcpy(&four, numbers + 2 * i, 8);
      counts[0][four >> 8 & 0x7f]++, counts[1][four >> 24 & 0x7f]++;
      counts[2][four >> 40 & 0x7f]++, counts[3][four >> 56 & 0x7f]++;
    }
    for (; i < count; i++) counts[0][numbers[2 * i + 1] & 0x7f]++;
  }
  uint32_t of(int exponent) const {
    uint32_t sum = 0;
    for (int i = 0; i < COUNTS; i++) sum += counts[i][exponent];
    return sum;
  }
};

class PanelWriter {
 public:
  // Chooses the high bytes that are there most often, and writes them first without and then with a sign.
  PanelWriter(char* out, int tiles, const ExponentCounts& counts) : panel{out, tiles} {
    uint8_t order[EXPONENTS];
    uint32_t sums[EXPONENTS];
    for (int e = 0; e < EXPONENTS; e++) order[e] = (uint8_t)e, place[e] = NO_PLACE, sums[e] = counts.of(e);
    auto is_before = [&](int a, int b) { return sums[a] > sums[b] || (sums[a] == sums[b] && a < b); };
    std::partial_sort(order, order + CHOSEN, order + EXPONENTS, is_before);
    uint8_t* high_bytes = (uint8_t*)panel.high_bytes();
    for (int i = 0; i < CHOSEN; i++) {
      high_bytes[i] = chosen[i] = order[i], high_bytes[CHOSEN + i] = order[i] | 0x80;
      place[order[i]] = (uint8_t)i;
    }
    first = at = (Rare*)panel.rare();
    end = first + std::min(65535, tiles * RARE_PER_TILE);
    starts()[0] = 0;
  }

  // Writes the next tile; false: there are too many rare numbers.
  bool add(const uint16_t* words) {
    bool has_rare = false;
    for (int b = 0; b < TILE_BLOCKS; b++)
      has_rare |= write_block(words + b * 2 * BLOCK, (uint8_t*)panel.tile(tile) + b * BLOCK_BYTES);
    if (has_rare && !list_rare(words)) return false;
    starts()[++tile] = (uint16_t)(at - first);
    return true;
  }

 private:
  uint16_t* starts() { return (uint16_t*)panel.starts(); }

  bool list_rare(const uint16_t* words) {
    for (int i = 0; i < TILE; i++) {
      if (place[exponent_of(words[i])] != NO_PLACE) continue;
      if (at == end) return false;
      *at++ = {(uint16_t)i, (uint16_t)(words[i] >> 8)};
    }
    return true;
  }

  // Places of high bytes, of those that have none CHOSEN - 1; `common`: which have one.
  __m256i places_of(__m256i high, __m256i& common) const {
    const __m256i exponent = _mm256_and_si256(high, _mm256_set1_epi8(0x7f));
    __m256i places = _mm256_set1_epi8(CHOSEN - 1);
    common = _mm256_cmpeq_epi8(exponent, _mm256_set1_epi8((char)chosen[CHOSEN - 1]));
    for (int i = 0; i < CHOSEN - 1; i++) {
      const __m256i is_here = _mm256_cmpeq_epi8(exponent, _mm256_set1_epi8((char)chosen[i]));
      common = _mm256_or_si256(common, is_here);
      places = _mm256_xor_si256(places, _mm256_and_si256(is_here, _mm256_set1_epi8((char)(i ^ (CHOSEN - 1)))));
    }
    return _mm256_or_si256(places, _mm256_and_si256(_mm256_srli_epi16(high, 4), _mm256_set1_epi8(CHOSEN)));
  }

  // Bytes `p` to `p` + 31 of a half of a block, whose words `word_of_byte` says; false: a number is rare.
  bool write_half(const uint16_t* words, uint8_t* low_bytes, __m256i& places) const {
    const __m256i left = _mm256_loadu_si256((const __m256i*)words), low = _mm256_set1_epi16(0xff);
    const __m256i right = _mm256_loadu_si256((const __m256i*)(words + 32));
    const __m256i bytes = _mm256_packus_epi16(_mm256_and_si256(left, low), _mm256_and_si256(right, low));
    _mm256_storeu_si256((__m256i*)low_bytes, bytes);
    __m256i common;
    places = places_of(_mm256_packus_epi16(_mm256_srli_epi16(left, 8), _mm256_srli_epi16(right, 8)), common);
    return _mm256_movemask_epi8(common) == -1;
  }

  // Returns whether any number of a block is rare.
  bool write_block(const uint16_t* words, uint8_t* block) const {
    bool are_common = true;
    for (int p = 0; p < BLOCK; p += 32) {
      __m256i of_first, of_second;
      are_common &= write_half(words + word_of_byte(p), block + BLOCK + p, of_first);
      are_common &= write_half(words + BLOCK + word_of_byte(p), block + 2 * BLOCK + p, of_second);
      _mm256_storeu_si256((__m256i*)(block + p), _mm256_or_si256(of_first, _mm256_slli_epi16(of_second, 4)));
    }
    return !are_common;
  }

  CompactPanel panel;
  uint8_t place[EXPONENTS], chosen[CHOSEN];
  Rare *first, *at, *end;
  int tile = 0;
};

}  // namespace
