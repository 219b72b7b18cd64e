// 128-bit XXH3 of more than 240 bytes, by its specification
// (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md), taken in the pass that copies them: each stripe of
// 64 bytes is loaded once, stored, and added to the sums.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>

namespace {

enum { LINE = 64, DIGEST_BYTES = 16 };

namespace xxh3 {

enum { STRIPE = 64, SECRET_BYTES = 192, STRIPES = (SECRET_BYTES - STRIPE) / 8, LAST = 7, MERGED = 11 };

const uint64_t FACTORS64[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
                              0x27D4EB2F165667C5};
const uint32_t FACTORS32[] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};

alignas(LINE) const uint8_t SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

inline uint64_t word(const void* p) {
  uint64_t w;
  memcpy(&w, p, sizeof w);
  return w;
}

// Eight sums of 64 bits, and the steps of the specification on them.
#ifdef __AVX512F__

struct Sums {
  __m512i v;
};
typedef __m512i Stripe;

inline Stripe loaded(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void stored(uint8_t* p, Stripe data) { _mm512_storeu_si512(p, data); }
inline void stored_past(uint8_t* p, Stripe data) { _mm512_stream_si512((__m512i*)p, data); }
inline void add(Sums& sums, Stripe data, const uint8_t* secret) {
  const __m512i keyed = _mm512_xor_si512(data, _mm512_loadu_si512(secret));
  const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
  sums.v = _mm512_add_epi64(sums.v, _mm512_shuffle_epi32(data, (_MM_PERM_ENUM)_MM_SHUFFLE(1, 0, 3, 2)));
  sums.v = _mm512_add_epi64(sums.v, product);
}
inline void scramble(Sums& sums, const uint8_t* secret) {
  __m512i a = _mm512_xor_si512(sums.v, _mm512_srli_epi64(sums.v, 47));
  a = _mm512_xor_si512(a, _mm512_loadu_si512(secret));
  const __m512i factor = _mm512_set1_epi64(FACTORS32[0]);
  const __m512i high = _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(a, 32), factor), 32);
  sums.v = _mm512_add_epi64(_mm512_mul_epu32(a, factor), high);
}
inline Sums loaded_sums(const uint64_t* p) { return {_mm512_loadu_si512(p)}; }
inline void stored(uint64_t* p, Sums sums) { _mm512_storeu_si512(p, sums.v); }

#else

struct Sums {
  __m256i v[2];
};
struct Stripe {
  __m256i v[2];
};

inline __m256i loaded_half(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void stored_half(void* p, __m256i a) { _mm256_storeu_si256((__m256i*)p, a); }
inline Stripe loaded(const uint8_t* p) { return {{loaded_half(p), loaded_half(p + 32)}}; }
inline void stored(uint8_t* p, Stripe data) {
  for (int i = 0; i < 2; i++) stored_half(p + 32 * i, data.v[i]);
}
inline void stored_past(uint8_t* p, Stripe data) {
  for (int i = 0; i < 2; i++) _mm256_stream_si256((__m256i*)(p + 32 * i), data.v[i]);
}
inline void add(Sums& sums, Stripe data, const uint8_t* secret) {
  for (int i = 0; i < 2; i++) {
    const __m256i keyed = _mm256_xor_si256(data.v[i], loaded_half(secret + 32 * i));
    const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    sums.v[i] = _mm256_add_epi64(sums.v[i], _mm256_shuffle_epi32(data.v[i], _MM_SHUFFLE(1, 0, 3, 2)));
    sums.v[i] = _mm256_add_epi64(sums.v[i], product);
  }
}
inline void scramble(Sums& sums, const uint8_t* secret) {
  const __m256i factor = _mm256_set1_epi64x(FACTORS32[0]);
  for (int i = 0; i < 2; i++) {
    __m256i a = _mm256_xor_si256(sums.v[i], _mm256_srli_epi64(sums.v[i], 47));
    a = _mm256_xor_si256(a, loaded_half(secret + 32 * i));
    const __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(a, 32), factor), 32);
    sums.v[i] = _mm256_add_epi64(_mm256_mul_epu32(a, factor), high);
  }
}
inline Sums loaded_sums(const uint64_t* p) { return {{loaded_half(p), loaded_half(p + 4)}}; }
inline void stored(uint64_t* p, Sums sums) {
  for (int i = 0; i < 2; i++) stored_half(p + 4 * i, sums.v[i]);
}

#endif

inline uint64_t folded(uint64_t a, uint64_t b) {
  const unsigned __int128 product = (unsigned __int128)a * b;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
}

inline uint64_t merged(const uint64_t* sums, const uint8_t* secret, uint64_t h) {
  for (int i = 0; i < 8; i += 2) h += folded(sums[i] ^ word(secret + 8 * i), sums[i + 1] ^ word(secret + 8 * i + 8));
  h ^= h >> 37;
  h *= 0x165667919E3779F9;
  return h ^ (h >> 32);
}

}  // namespace xxh3

// The digest of one row while its bytes are copied to it, in any parts. PAST: they are written past this core's caches,
// since another one reads them next; a row begins at a cache line.
template <bool PAST> class Digest {
 public:
  // `bytes` of the row, more than 240.
  Digest(uint8_t* row, int64_t bytes, uint64_t seed) : row_(row), bytes_(bytes) {
    using namespace xxh3;
    for (int i = 0; i < SECRET_BYTES; i += 16) {
      const uint64_t words[] = {word(SECRET + i) + seed, word(SECRET + i + 8) - seed};
      memcpy(secret_ + i, words, sizeof words);
    }
    const uint64_t first[] = {FACTORS32[2], FACTORS64[0], FACTORS64[1], FACTORS64[2],
                              FACTORS64[3], FACTORS32[1], FACTORS64[4], FACTORS32[0]};
    sums_ = loaded_sums(first);
  }

  // Copies the next bytes of the row. Meanwhile fetches as many from `ahead`, which no core foresees; null: none.
  void copy(const uint8_t* from, int64_t bytes, const uint8_t* ahead) {
    using namespace xxh3;
    uint8_t* to = row_ + num_copied_;
    num_copied_ += bytes;
    const int64_t can_take = std::min(num_copied_, whole()) - num_taken_;
    if (num_taken_ == to - row_ && can_take >= STRIPE) {  // at a stripe: each one on its way
      const int64_t taken = take<PAST>(from, to, can_take / STRIPE, ahead ? ahead : from);
      from += taken, to += taken, bytes -= taken;
    }
    memcpy(to, from, bytes);
    const int64_t left = std::min(num_copied_, whole()) - num_taken_;
    if (left >= STRIPE) take<false>(row_ + num_taken_, row_ + num_taken_, left / STRIPE, row_);
  }

  // Writes the digest, in its canonical order, once all is copied.
  void write(uint8_t* digest) {
    using namespace xxh3;
    add(sums_, loaded(row_ + bytes_ - STRIPE), secret_ + SECRET_BYTES - STRIPE - LAST);
    uint64_t sums[8];
    stored(sums, sums_);
    const uint64_t length = (uint64_t)bytes_;
    const uint64_t low = merged(sums, secret_ + MERGED, length * FACTORS64[0]);
    const uint64_t high = merged(sums, secret_ + SECRET_BYTES - STRIPE - MERGED, ~(length * FACTORS64[1]));
    const uint64_t words[] = {__builtin_bswap64(high), __builtin_bswap64(low)};
    memcpy(digest, words, sizeof words);
  }

 private:
  // Bytes of the stripes that are taken one after the other; the last 64 bytes of the row are one more.
  int64_t whole() const { return (bytes_ - 1) / xxh3::STRIPE * xxh3::STRIPE; }

  // Takes stripes, and stores each at `to`. Returns their bytes.
  template <bool PAST_CACHES> int64_t take(const uint8_t* from, uint8_t* to, int64_t count, const uint8_t* ahead) {
    using namespace xxh3;
    Sums sums = sums_;  // in registers: stores could change what lies in memory
    int next = next_;
    for (int64_t i = 0; i < count;) {
      const int64_t end = std::min<int64_t>(count, i + STRIPES - next);
      for (; i < end; i++, next++) {
        const Stripe data = loaded(from + STRIPE * i);
        __builtin_prefetch(ahead + STRIPE * i);
        PAST_CACHES ? stored_past(to + STRIPE * i, data) : stored(to + STRIPE * i, data);
        add(sums, data, secret_ + 8 * next);
      }
      if (next == STRIPES) {
        scramble(sums, secret_ + SECRET_BYTES - STRIPE);
        next = 0;
      }
    }
    sums_ = sums;
    next_ = next;
    num_taken_ += STRIPE * count;
    return STRIPE * count;
  }

  alignas(LINE) uint8_t secret_[xxh3::SECRET_BYTES];
  xxh3::Sums sums_;
  uint8_t* const row_;
  const int64_t bytes_;
  int64_t num_copied_ = 0, num_taken_ = 0;
  int next_ = 0;  // stripe of a block
};

}  // namespace
