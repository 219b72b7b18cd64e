// A decoder of one dtype behind an interface without templates: dtypes are compiled by themselves, at the same time.
// What a step computes is in `step.h`; the library's entry points are in `executor.cpp`.
#pragma once
#include "adapted_experts.h"
#include "adapted_heads.h"
#include "adapted_rows.h"
#include "apart.h"
#include "attention_half.h"
#include "head.h"
#include "latent_attention.h"
#include "launched.h"
#include "layer_inputs.h"
#include "mlp_half.h"
#include "paged_attention.h"
#include "recurrence.h"
#include "residual.h"
#include "routing.h"
#include "short_conv.h"
#include "wanted_rows.h"
#include "step.h"

namespace holdfast {

struct AnyDecoder {
  virtual ~AnyDecoder() {}
  virtual int drain() = 0;
  virtual int begin(const NativeStep& step) = 0;
  virtual int run(int first, int end, int finished_layer) = 0;
  virtual int launch(const NativeStep& step) = 0;  // a whole step, which another thread begins and runs
  virtual int await() = 0;                         // outcome of the oldest one that was launched and not awaited
  virtual float* partial() = 0;
  virtual float* residual() = 0;
  virtual long stride() = 0;
};

// Of FLOAT16 and FLOAT32 (`plain.cpp`). A class with tiles and one without share them: only bf16 has tiles.
AnyDecoder* plain_decoder(const NativeModel& model, int dtype, Pool* pool);
AnyAttention* plain_attention(const NativeAttention* layers, int num_layers, int block_size, int dtype, Pool* pool);
int plain_product(Pool* pool, const NativeLinear& linear, int dtype, const void* rows, long stride, int count,
                  float* out);
void plain_added(const NativeAdapted& adapted, int dtype, const void* row, int slices, long length, int groups,
                 float* out);

}  // namespace holdfast

namespace {

template <class W> struct TypedDecoder : holdfast::AnyDecoder {
  holdfast::Pool* pool;
  Decoder<W> decoder;
  Apart<W> apart;
  CutStep now;  // the step that has begun, if it is in pieces
  const int num_segments;
  LaunchedSteps<TypedDecoder> launched;  // ends before what it uses
  TypedDecoder(const NativeModel& model, holdfast::Pool* pool)
      : pool(pool),
        decoder(model, native_pool_threads(pool)),
        apart(model, native_pool_threads(pool)),
        num_segments(3 * model.num_layers + 2),
        launched(*this, pool) {}
  int drain() override { return launched.is_idle() ? native_pool_drain(pool) : (int)holdfast::kBusy; }
  int begin(const NativeStep& step) override {
    return holdfast::prepared([&] {
      if (!cut(step, now)) decoder.begin(step);
      return holdfast::kDone;
    });
  }
  int run(int first, int end, int finished_layer) override {
    return now.pieces.empty() ? decoder.run(pool, first, end, finished_layer)
                              : run_pieces();  // pieces: of a whole step
  }
  int launch(const NativeStep& step) override { return launched.launch(step); }
  int await() override { return launched.await(); }
  bool cut(const NativeStep& step, CutStep& out) {
    if (!apart.cut(step, out)) return false;
    decoder.fill_rotaries(step);  // which threads only read then
    return true;
  }
  int run_whole(const NativeStep& step) {
    const int outcome = holdfast::prepared([&] { return decoder.begin(step), holdfast::kDone; });
    return outcome == holdfast::kDone ? decoder.run(pool, 0, num_segments, -1) : outcome;
  }
  void run_piece(const NativeStep& piece, holdfast::Run& run) { apart.run(piece, run); }
  struct PiecesJob {
    TypedDecoder* own;
    int count;
    void go(holdfast::Run& run) const {
      holdfast::tasks(run, count, [&](int i) { own->run_piece(own->now.pieces[i], run); });
    }
  };
  int run_pieces() {
    const PiecesJob job = {this, (int)now.pieces.size()};
    return holdfast::run(
        pool, [](const void* argument, holdfast::Run& run) { ((const PiecesJob*)argument)->go(run); }, &job);
  }
  float* partial() override { return decoder.partial(); }
  float* residual() override { return decoder.residual(); }
  long stride() override { return decoder.partial_stride(); }
};

// A product of one linear, which is no decoder's.
struct ProductJob {
  NativeLinear linear;
  const void* rows;
  long stride, call;
  int count, threads;
  float* out;

  // Outputs of a group that are there, with the bias.
  void put(int group, int first, int some, float* sums) const {
    const int column = group * GROUP, columns = std::min((int)GROUP, linear.outputs - column);
    for (int r = 0; r < some; r++) {
      if (linear.bias) add_to(sums + r * GROUP, linear.bias + column, GROUP);
      memcpy(out + (long)(first + r) * linear.outputs + column, sums + r * GROUP, columns * sizeof(float));
    }
  }
};

template <class W> void product_job(const void* argument, holdfast::Run& run) {
  static thread_local std::unique_ptr<Scratch> scratch;
  const ProductJob job = *(const ProductJob*)argument;
  const unsigned control = _mm_getcsr();
  _mm_setcsr(control | 0x8040);  // denormals are zeros, as in a decoder
  auto own = [&]() -> Scratch& {
    if (!scratch) scratch.reset(new Scratch);
    return *scratch;
  };
  product_tasks(run, job.threads, packed<W>(job.linear), 0, job.linear.groups,
                (const typename InputOf<W>::Type*)job.rows, job.stride, job.count, job.call, own,
                [&](int group, int first, int some, float* sums) { job.put(group, first, some, sums); });
  if (scratch) release_tiles(scratch->tiles);
  _mm_setcsr(control);
}

template <class W>
int multiply(holdfast::Pool* pool, const NativeLinear& linear, const void* rows, long stride, int count, float* out) {
  static std::atomic<long> calls{0};
  if (!count) return holdfast::kDone;
  const ProductJob job = {linear, rows, stride, ++calls, count, native_pool_threads(pool), out};
  return holdfast::run(pool, product_job<W>, &job);
}

}  // namespace
