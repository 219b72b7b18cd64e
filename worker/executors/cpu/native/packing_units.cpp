// Packing of quantized weights into units, once at load: see `units.h` for the layout.
#include <stdint.h>
#include <string.h>

#include "decoder.h"
#include "pool.h"

namespace {

enum { UNIT = 32, OUTPUTS = 32, LINE = 64, UNITS_TOGETHER = 8 };

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
  int lines() const { return form.bits; }      // of a unit of 16 outputs
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

// The codes of unit `u` of a row, a byte each from the lowest on: where they lie, or in `room`.
const uint8_t* bytes_of(int stored, const uint8_t* row, int u, uint8_t* room) {
  if (stored == FROM_LOWEST) return row + (long)u * UNIT;
  if (stored == FROM_MIDDLE) {
    for (int i = 0; i < UNIT; i++) room[i] = row[(long)u * UNIT + i] ^ 0x80;
    return room;
  }
  const uint8_t* pairs = row + (long)u * UNIT / 2;
  for (int i = 0; i < UNIT / 2; i++) room[2 * i] = pairs[i] & 0xf, room[2 * i + 1] = pairs[i] >> 4;
  return room;
}

// Four codes of a row, as they lie in line `i`.
uint32_t four_codes(int bits, const uint8_t* codes, int i) {
  const uint32_t LOWER = 0x0f0f0f0f;
  if (bits == 8) return word_of(codes + 4 * i);
  if (i < 4) return (word_of(codes + 4 * i) & LOWER) | (word_of(codes + 16 + 4 * i) & LOWER) << 4;
  const int more = bits - 4, per_half = 4 / more;  // bits above the fourth; groups of four codes in half a byte
  uint32_t line = 0;
  for (int at = 0; at < 2 * per_half; at++) {
    const int place = (i - 4) * 2 * per_half + at, shift = at < per_half ? 4 + at * more : (at - per_half) * more;
    line |= (word_of(codes + place % 2 * 16 + place / 2 * 4) >> 4 & LOWER) << shift;
  }
  return line;
}

// Unit `u` of output `n`, as output `place` of its panel.
void pack_unit(const UnitSource& s, long n, int place, int u, char* out) {
  const int lines = s.lines();
  char* codes = out + place / 16 * lines * LINE + place % 16 * 4;
  uint8_t room[UNIT];
  const uint8_t* bytes = bytes_of(s.stored[n], s.codes[n], u, room);
  for (int i = 0; i < lines; i++) {
    const uint32_t four = four_codes(s.form.bits, bytes, i);
    memcpy(codes + i * LINE, &four, 4);
  }
  char *scales = out + 2 * lines * LINE, *offsets = scales + OUTPUTS * s.scale_bytes;
  memcpy(scales + place * s.scale_bytes, s.scales[n] + (long)u * s.scale_bytes, s.scale_bytes);
  if (s.offset_bytes) memcpy(offsets + place * s.offset_bytes, s.offsets[n] + (long)u * s.offset_bytes, s.offset_bytes);
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
  const long unit_bytes = s.unit_bytes();
  holdfast::tasks(run, (int)job.panels, [&](int panel) {
    char* out = job.out + panel * s.panel_bytes();
    memset(out, 0, s.panel_bytes());
    const long first = panel * (long)OUTPUTS;
    for (int u = 0; u < s.units; u++)
      for (int place = 0; place < OUTPUTS; place++)
        if (s.codes[first + place]) pack_unit(s, first + place, place, u, out + u * unit_bytes);
    for (int place = 0; s.num_factors && place < OUTPUTS; place++)
      if (s.codes[first + place]) pack_factors(s, first + place, place, out + s.units * unit_bytes);
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
