// Packing of quantized weights into units, once at load: see `units.h` for the layout. Compiled for any x86-64.
#include <stdint.h>
#include <string.h>

#include "decoder.h"
#include "pool.h"

namespace {

enum { UNIT = 32, OUTPUTS = 32, LINE = 64 };

struct UnitSource {
  const uint8_t* const* codes;  // [outputs]: where each row's codes begin, a byte each, or null for a row of zeros
  const char* const* scales;    // [outputs]: likewise its units' scales
  const char* const* offsets;   // [outputs]: likewise their minima or zero points, if there are any
  NativeUnits form;
  int units;  // of a row
  int scale_bytes, offset_bytes;  // of one output's unit
};

// Four codes of a row, as they lie in a line.
uint32_t four_codes(const UnitSource& s, const uint8_t* codes, int line) {
  uint32_t low, high;
  memcpy(&low, codes + 4 * line, 4);
  if (s.form.bits == 8) return low;
  memcpy(&high, codes + 16 + 4 * line, 4);
  return low | high << 4;
}

// Unit `u` of output `n`, as output `place` of its panel.
void pack_unit(const UnitSource& s, long n, int place, int u, char* out) {
  const int lines = s.form.bits == 8 ? 8 : 4;
  char* codes = out + place / 16 * lines * LINE + place % 16 * 4;
  for (int i = 0; i < lines; i++) {
    const uint32_t four = four_codes(s, s.codes[n] + (long)u * UNIT, i);
    memcpy(codes + i * LINE, &four, 4);
  }
  char *scales = out + 2 * lines * LINE, *offsets = scales + OUTPUTS * s.scale_bytes;
  memcpy(scales + place * s.scale_bytes, s.scales[n] + (long)u * s.scale_bytes, s.scale_bytes);
  if (s.offset_bytes)
    memcpy(offsets + place * s.offset_bytes, s.offsets[n] + (long)u * s.offset_bytes, s.offset_bytes);
}

struct UnitJob {
  UnitSource source;
  long panels;
  char* out;
};

void pack_all_units(const void* argument, holdfast::Run& run) {
  const UnitJob job = *(const UnitJob*)argument;
  const UnitSource& s = job.source;
  const long unit_bytes = OUTPUTS * (UNIT * s.form.bits / 8 + s.scale_bytes + s.offset_bytes);
  holdfast::tasks(run, (int)job.panels, [&](int panel) {
    char* out = job.out + panel * s.units * unit_bytes;
    memset(out, 0, s.units * unit_bytes);
    for (int place = 0; place < OUTPUTS; place++) {
      const long n = panel * (long)OUTPUTS + place;
      for (int u = 0; s.codes[n] && u < s.units; u++) pack_unit(s, n, place, u, out + u * unit_bytes);
    }
  });
}

}  // namespace

extern "C" int native_pack_units(holdfast::Pool* pool, const uint8_t* const* codes, const char* const* scales,
                                 const char* const* offsets, long outputs, int units, const NativeUnits* form, char* out) {
  const int scale_bytes = form->scales == HF_FLOAT_SCALES ? 4 : 2;
  const int offset_bytes = form->offset == HF_MINIMA ? scale_bytes : form->offset == HF_ZERO_POINTS ? 1 : 0;
  UnitJob job = {{codes, scales, offsets, *form, units, scale_bytes, offset_bytes}, outputs / OUTPUTS, out};
  return holdfast::run(pool, pack_all_units, &job);
}
