// A decoder of one dtype behind an interface without templates: dtypes are compiled by themselves, at the same time.
// What a step computes is in `step.h`; the library's entry points are in `executor.cpp`.
#pragma once
#include "attention_half.h"
#include "head.h"
#include "mlp_half.h"
#include "wanted_rows.h"
#include "step.h"

namespace holdfast {

struct AnyDecoder {
  virtual ~AnyDecoder() {}
  virtual int drain() = 0;
  virtual int begin(const NativeStep& step) = 0;
  virtual int run(int first, int end, int finished_layer) = 0;
  virtual float* partial() = 0;
  virtual float* residual() = 0;
  virtual long stride() = 0;
};

// Of FLOAT16 and FLOAT32 (`plain.cpp`). A class with tiles and one without share them: only bf16 has tiles.
AnyDecoder* plain_decoder(const NativeModel& model, int dtype, Pool* pool);
void plain_product(const NativeLinear& linear, int dtype, const void* rows, long stride, int count, float* out);

}  // namespace holdfast

namespace {

template <class W> struct TypedDecoder : holdfast::AnyDecoder {
  holdfast::Pool* pool;
  Decoder<W> decoder;
  TypedDecoder(const NativeModel& model, holdfast::Pool* pool) : pool(pool), decoder(model, native_pool_threads(pool)) {}
  int drain() override { return native_pool_drain(pool); }
  int begin(const NativeStep& step) override {
    return holdfast::prepared([&] { return decoder.begin(step), holdfast::kDone; });
  }
  int run(int first, int end, int finished_layer) override { return decoder.run(pool, first, end, finished_layer); }
  float* partial() override { return decoder.partial(); }
  float* residual() override { return decoder.residual(); }
  long stride() override { return decoder.partial_stride(); }
};

template <class W> void multiply(const NativeLinear& linear, const void* rows, long stride, int count, float* out) {
  typedef typename InputOf<W>::Type Input;
  std::unique_ptr<Scratch> scratch(new Scratch);
  Packed<W> w = packed<W>(linear);
  for (int first = 0; first < count; first += MAX_ROWS) {
    int some = std::min((int)MAX_ROWS, count - first);
    InputRows<W> input = input_rows<W>(*scratch, (const Input*)rows + first * stride, stride, some, w.row_length());
    for (int g = 0; g < w.groups; g++) {
      product(*scratch, w, g, input, scratch->sums);
      for (int r = 0; r < some; r++)
        memcpy(out + ((long)(first + r) * w.groups + g) * GROUP, scratch->sums + r * GROUP, GROUP * 4);
    }
  }
  release_tiles(scratch->tiles);
}

}  // namespace
