// Packing of quantized weights into units, once at load: see `units.h` for the layout.
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>

#include "decoder.h"
#include "pool.h"

namespace {

enum { UNIT = 32, OUTPUTS = 32, LINE = 64, UNITS_TOGETHER = 8 };
// Outputs, neighbours in a panel, that are packed together, and units of each.
enum { TOGETHER = 4, AT_ONCE = 8 };

// How codes lie in their source: a byte each, counted from the lowest or from the middle, or two in a byte, the first in the
// low bits.
enum Stored { FROM_LOWEST, FROM_MIDDLE, PAIRS };

struct UnitSource {
  const uint8_t* const* codes;  // [outputs]: where each row's codes begin, or null for a row of zeros
  const uint8_t* stored;        // [outputs]: how they lie there
  const char* const* scales;    // [outputs]: likewise its units' scales
  const char* const* offsets;   // [outputs]: likewise their minima, zero points, or second scales, if there are any
  const char* const* factors;   // [outputs]: likewise the factors of eight units each, if there are any
  NativeUnits form;
  int units;                                   // of a row
  int scale_bytes, offset_bytes, num_factors;  // of one output's unit; of eight of them
  long unit_bytes() const { return OUTPUTS * (UNIT * form.bits / 8 + scale_bytes + offset_bytes); }
  int together() const { return (form.before + units + UNITS_TOGETHER - 1) / UNITS_TOGETHER; }
  long panel_bytes() const {
    return unit_bytes() * units + (num_factors ? (long)together() * num_factors * OUTPUTS * 2 : 0);
  }
};

uint32_t word_of(const uint8_t* codes) {
  uint32_t word;
  memcpy(&word, codes, 4);
  return word;
}

// The codes of a unit of a row, a byte each from the lowest on.
struct RowCodes {
  __m128i first, second;  // of inputs 0 to 15, and 16 to 31

  // Of each byte the lower four bits of a code of the first half, and above them those of one of the second.
  __m128i lower_bits() const {
    const __m128i low = _mm_set1_epi8(0x0f);
    return _mm_or_si128(_mm_and_si128(first, low), _mm_slli_epi16(_mm_and_si128(second, low), 4));
  }
};

RowCodes codes_of(int stored, const uint8_t* row, int u) {
  if (stored == PAIRS) {
    const __m128i pairs = _mm_loadu_si128((const __m128i*)(row + (long)u * UNIT / 2)), low = _mm_set1_epi8(0x0f);
    const __m128i even = _mm_and_si128(pairs, low), odd = _mm_and_si128(_mm_srli_epi16(pairs, 4), low);
    return {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
  }
  const __m128i* codes = (const __m128i*)(row + (long)u * UNIT);
  const __m128i middle = _mm_set1_epi8(stored == FROM_MIDDLE ? (char)0x80 : 0);
  return {_mm_xor_si128(_mm_loadu_si128(codes), middle), _mm_xor_si128(_mm_loadu_si128(codes + 1), middle)};
}

// Four codes of a row beyond their lower four bits, as they lie in line `i`, from 4 on.
uint32_t upper_bits(int bits, const uint8_t* codes, int i) {
  const uint32_t LOWER = 0x0f0f0f0f;
  const int more = bits - 4, per_half = 4 / more;  // bits above the fourth; groups of four codes in half a byte
  uint32_t line = 0;
  for (int at = 0; at < 2 * per_half; at++) {
    const int place = (i - 4) * 2 * per_half + at, shift = at < per_half ? 4 + at * more : (at - per_half) * more;
    line |= (word_of(codes + place % 2 * 16 + place / 2 * 4) >> 4 & LOWER) << shift;
  }
  return line;
}

// Four lines of TOGETHER outputs: line i has word i of each row.
void put_lines(const __m128i (&rows)[TOGETHER], char* out) {
  const __m128i a = _mm_unpacklo_epi32(rows[0], rows[1]), b = _mm_unpacklo_epi32(rows[2], rows[3]);
  const __m128i c = _mm_unpackhi_epi32(rows[0], rows[1]), d = _mm_unpackhi_epi32(rows[2], rows[3]);
  const __m128i lines[4] = {_mm_unpacklo_epi64(a, b), _mm_unpackhi_epi64(a, b), _mm_unpacklo_epi64(c, d),
                            _mm_unpackhi_epi64(c, d)};
  for (int i = 0; i < 4; i++) _mm_storeu_si128((__m128i*)(out + i * LINE), lines[i]);
}

// The codes of unit `u` of TOGETHER outputs from `n` on, from `place` of their panel on. Rows of zeros have none.
template <int BITS> void pack_codes(const UnitSource& s, long n, int place, int u, char* out) {
  RowCodes codes[TOGETHER];
  for (int i = 0; i < TOGETHER; i++)
    codes[i] = s.codes[n + i] ? codes_of(s.stored[n + i], s.codes[n + i], u) : RowCodes{};
  __m128i lower[TOGETHER];
  char* lines = out + place / 16 * BITS * LINE + place % 16 * 4;
  for (int i = 0; i < TOGETHER; i++) lower[i] = BITS == 8 ? codes[i].first : codes[i].lower_bits();
  put_lines(lower, lines);
  if (BITS == 8) {
    for (int i = 0; i < TOGETHER; i++) lower[i] = codes[i].second;
    put_lines(lower, lines + 4 * LINE);
    return;
  }
  alignas(16) uint8_t bytes[UNIT];
  for (int i = 0; BITS > 4 && i < TOGETHER; i++) {
    _mm_store_si128((__m128i*)bytes, codes[i].first);
    _mm_store_si128((__m128i*)(bytes + 16), codes[i].second);
    for (int line = 4; line < BITS; line++) {
      const uint32_t word = upper_bits(BITS, bytes, line);
      memcpy(lines + line * LINE + i * 4, &word, 4);
    }
  }
}

// The scales, or the like, of unit `u` of TOGETHER outputs: BYTES each.
template <int BYTES> void put_numbers(const char* const* rows, int place, int u, char* out) {
  for (int i = 0; i < TOGETHER; i++)
    if (rows[i]) memcpy(out + (place + i) * BYTES, rows[i] + (long)u * BYTES, BYTES);
}

void put_numbers(int bytes, const char* const* rows, int place, int u, char* out) {
  (bytes == 1 ? put_numbers<1> : bytes == 2 ? put_numbers<2> : put_numbers<4>)(rows, place, u, out);
}

// Some units of TOGETHER outputs. What they have of the units after these is fetched.
template <int BITS> void pack_some(const UnitSource& s, long n, int place, int first, int last, char* out) {
  const long unit_bytes = s.unit_bytes();
  for (int u = first; u < last; u++) {
    char* unit = out + u * unit_bytes;
    pack_codes<BITS>(s, n, place, u, unit);
    char *scales = unit + 2 * BITS * LINE, *offsets = scales + OUTPUTS * s.scale_bytes;
    put_numbers(s.scale_bytes, s.scales + n, place, u, scales);
    if (s.offset_bytes) put_numbers(s.offset_bytes, s.offsets + n, place, u, offsets);
  }
  for (int i = 0; i < TOGETHER && last < s.units; i++) {
    const int unit = s.stored[n + i] == PAIRS ? UNIT / 2 : UNIT;
    for (int at = last * unit; s.codes[n + i] && at < std::min(2 * last - first, s.units) * unit; at += LINE)
      _mm_prefetch(s.codes[n + i] + at, _MM_HINT_T0);
  }
}

// All units of a panel, some of them at a time, so that the lines that four outputs share stay in the nearest cache.
template <int BITS> void pack_panel(const UnitSource& s, long first, char* out) {
  for (int u = 0; u < s.units; u += AT_ONCE)
    for (int place = 0; place < OUTPUTS; place += TOGETHER)
      pack_some<BITS>(s, first + place, place, u, std::min(u + AT_ONCE, s.units), out);
}

// The factors of output `n`, as output `place` of its panel: float16, of eight units one after the other.
void pack_factors(const UnitSource& s, long n, int place, char* out) {
  for (int i = 0; i < s.together() * s.num_factors; i++)
    memcpy(out + (i * OUTPUTS + place) * 2, s.factors[n] + i * 2, 2);
}

struct UnitJob {
  UnitSource source;
  long panels;
  char* out;
};

void pack_all_units(const void* argument, holdfast::Run& run) {
  const UnitJob job = *(const UnitJob*)argument;
  const UnitSource& s = job.source;
  holdfast::tasks(run, (int)job.panels, [&](int panel) {
    char* out = job.out + panel * s.panel_bytes();
    const long first = panel * (long)OUTPUTS;
    const bool is_full =
        std::all_of(s.codes + first, s.codes + first + OUTPUTS, [](const uint8_t* row) { return row; });
    if (!is_full || s.num_factors) memset(out, 0, s.panel_bytes());
    const auto pack = s.form.bits == 4   ? pack_panel<4>
                      : s.form.bits == 5 ? pack_panel<5>
                      : s.form.bits == 6 ? pack_panel<6>
                                         : pack_panel<8>;
    pack(s, first, out);
    for (int place = 0; s.num_factors && place < OUTPUTS; place++)
      if (s.codes[first + place]) pack_factors(s, first + place, place, out + s.units * s.unit_bytes());
  });
}

}  // namespace

extern "C" int native_pack_units(holdfast::Pool* pool, const uint8_t* const* codes, const uint8_t* stored,
                                 const char* const* scales, const char* const* offsets, const char* const* factors,
                                 long outputs, int units, const NativeUnits* form, char* out) {
  const bool are_bytes = form->offset == NATIVE_BYTE_MINIMA || form->offset == NATIVE_BYTE_HALVES;
  const int scale_bytes = are_bytes ? 1 : form->scales == NATIVE_FLOAT_SCALES ? 4 : 2;
  const int offset_bytes = form->offset == NATIVE_MINIMA ? scale_bytes : form->offset == NATIVE_MIDDLE ? 0 : 1;
  const int num_factors = form->offset == NATIVE_BYTE_MINIMA ? 2 : form->offset == NATIVE_BYTE_HALVES ? 1 : 0;
  UnitJob job = {{codes, stored, scales, offsets, factors, *form, units, scale_bytes, offset_bytes, num_factors},
                 outputs / OUTPUTS,
                 out};
  return holdfast::run(pool, pack_all_units, &job);
}
