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
int plain_product_by(Pool* pool, const NativeLinear& linear, int dtype, const void* rows, long stride, int count, float* out);

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

// A product by all threads of a pool: a task is a group of outputs of some rows.
template <class W> struct ProductJob {
  NativeLinear linear;
  const void* rows;
  long stride, call;
  int count;
  float* out;
};

template <class W> void product_task(const ProductJob<W>& job, const Packed<W>& w, Scratch& scratch, int task) {
  typedef typename InputOf<W>::Type Input;
  const int first = task / w.groups * MAX_ROWS, group = task % w.groups, column = group * GROUP;
  const int some = std::min((int)MAX_ROWS, job.count - first), columns = std::min((int)GROUP, job.linear.outputs - column);
  const Input* rows = (const Input*)job.rows + first * job.stride;
  const InputRows<W> input = input_rows<W>(scratch, rows, job.stride, some, w.row_length(), job.call);
  product(scratch, w, group, input, scratch.sums);
  if (job.linear.bias)
    for (int r = 0; r < some; r++) add_to(scratch.sums + r * GROUP, job.linear.bias + column, GROUP);
  for (int r = 0; r < some; r++)
    memcpy(job.out + (long)(first + r) * job.linear.outputs + column, scratch.sums + r * GROUP, columns * sizeof(float));
  release_tiles(scratch.tiles);
}

template <class W> void product_job(const void* argument, holdfast::Run& run) {
  const ProductJob<W> job = *(const ProductJob<W>*)argument;
  const Packed<W> w = packed<W>(job.linear);
  const unsigned control = _mm_getcsr();
  _mm_setcsr(control | 0x8040);  // denormals are zeros, as in a decoder
  holdfast::tasks(run, (job.count + MAX_ROWS - 1) / MAX_ROWS * w.groups, [&](int task) {
    static thread_local std::unique_ptr<Scratch> scratch;
    if (!scratch) scratch.reset(new Scratch);
    product_task(job, w, *scratch, task);
  });
  _mm_setcsr(control);
}

template <class W>
int multiply_by(holdfast::Pool* pool, const NativeLinear& linear, const void* rows, long stride, int count, float* out) {
  static std::atomic<long> calls{0};
  const ProductJob<W> job = {linear, rows, stride, ++calls, count, out};
  return holdfast::run(pool, product_job<W>, &job);
}

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
