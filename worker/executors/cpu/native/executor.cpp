// The entry points of the library of one instruction class. There is one library for each, made from the same sources:
//   amx         bf16 products by AMX tiles, the rest as avx512
//   avx512bf16  bf16 products by two FMAs in one instruction, the rest as avx512
//   avx512      all products by FMA
//   avx2        likewise, with registers of half the width
//   tiles512, tiles2: as amx, with the tiles in software on avx512 or avx2 (tests, on machines without AMX; bf16 alone)
//   pairs2: as avx512bf16, with its instruction in software on avx2 (likewise)
// All give the same bits.
#include "typed.h"

#ifdef NATIVE_BF16_ALONE
holdfast::AnyDecoder* holdfast::plain_decoder(const NativeModel&, int, Pool*) { return nullptr; }
holdfast::AnyAttention* holdfast::plain_attention(const NativeAttention*, int, int, int, Pool*) { return nullptr; }
int holdfast::plain_product(Pool*, const NativeLinear&, int, const void*, long, int, float*) { return 0; }
void holdfast::plain_added(const NativeAdapted&, int, const void*, int, long, int, float*) {}
#endif

using holdfast::AnyAttention;
using holdfast::AnyDecoder;

namespace {

struct FlushedDenormals {
  unsigned control = _mm_getcsr();
  FlushedDenormals() { _mm_setcsr(control | 0x8040); }
  ~FlushedDenormals() { _mm_setcsr(control); }
};

}  // namespace

extern "C" {

void* native_decoder_create(const NativeModel* model, int dtype, holdfast::Pool* pool) {
  try {
    if (dtype == holdfast::BFLOAT16) return static_cast<AnyDecoder*>(new TypedDecoder<Bf16>(*model, pool));
    return holdfast::plain_decoder(*model, dtype, pool);
  } catch (const std::bad_alloc&) { return nullptr; }
}
// kBusy: a job runs, perhaps with its memory, and the decoder stays as it is.
int native_decoder_destroy(void* decoder) {
  if (((AnyDecoder*)decoder)->drain() == holdfast::kBusy) return holdfast::kBusy;
  delete (AnyDecoder*)decoder;
  return holdfast::kDone;
}
int native_decoder_begin(void* decoder, const NativeStep* step) { return ((AnyDecoder*)decoder)->begin(*step); }
int native_decoder_run(void* decoder, int first, int end, int finished_layer) {
  return ((AnyDecoder*)decoder)->run(first, end, finished_layer);
}
// A whole step on one rank, which a thread of the decoder runs. Meanwhile nothing else is done with it than this.
int native_decoder_launch(void* decoder, const NativeStep* step) { return ((AnyDecoder*)decoder)->launch(*step); }
// The outcome of the oldest step that was launched and not awaited.
int native_decoder_await(void* decoder) { return ((AnyDecoder*)decoder)->await(); }
// Bytes of the memory that ranks share for an exchange (`NativeExchange`); -1: there are more ranks than it can have.
long native_exchange_bytes(int ranks, long rows, int hidden, int parts) {
  if (ranks > holdfast::Exchange::kMostRanks) return -1;
  return holdfast::Exchange::bytes(ranks, rows, stride_of(sum_columns(hidden, parts)));
}
// What a sum over ranks is due of after a segment, and the residual stream: [rows][stride].
float* native_decoder_partial(void* decoder) { return ((AnyDecoder*)decoder)->partial(); }
float* native_decoder_residual(void* decoder) { return ((AnyDecoder*)decoder)->residual(); }
long native_decoder_stride(void* decoder) { return ((AnyDecoder*)decoder)->stride(); }

// out [count][outputs] = rows [count] of a linear's inputs times its weight, and its bias, on the threads of a pool.
int native_multiply(holdfast::Pool* pool, const NativeLinear* linear, int dtype, const void* rows, long stride,
                    int count, float* out) {
  if (dtype == holdfast::BFLOAT16) return multiply<Bf16>(pool, *linear, rows, stride, count, out);
  return holdfast::plain_product(pool, *linear, dtype, rows, stride, count, out);
}

// out [groups * 64] = what an adapter adds to the packed outputs of a linear, of one row of its inputs, [slices][length]. On
// the calling thread; it touches nothing that a step uses.
void native_added(const NativeAdapted* adapted, int dtype, const void* row, int slices, long length, int groups,
                  float* out) {
  FlushedDenormals flushed;
  if (dtype == holdfast::BFLOAT16) return added_alone<Bf16>(*adapted, row, slices, length, groups, out);
  holdfast::plain_added(*adapted, dtype, row, slices, length, groups, out);
}

// Attention over pages for modules that are not a decoder's. Null: there is no memory for it.
void* native_attention_create(const NativeAttention* layers, int num_layers, int block_size, int dtype,
                              holdfast::Pool* pool) {
  try {
    if (dtype == holdfast::BFLOAT16)
      return static_cast<AnyAttention*>(new PagedAttention<Bf16>(layers, num_layers, block_size, pool));
    return holdfast::plain_attention(layers, num_layers, block_size, dtype, pool);
  } catch (const std::bad_alloc&) { return nullptr; }
}
// kBusy: as of a decoder.
int native_attention_destroy(void* attention) {
  if (((AnyAttention*)attention)->drain() == holdfast::kBusy) return holdfast::kBusy;
  delete (AnyAttention*)attention;
  return holdfast::kDone;
}
int native_attention_begin(void* attention, const NativeStep* step) { return ((AnyAttention*)attention)->begin(*step); }
int native_attention_run(void* attention, int layer, const NativeAttentionRows* rows) {
  return ((AnyAttention*)attention)->run(layer, *rows);
}

// Whether this machine's instruction for pairs of bf16 rounds as two FMAs do, on numbers of all sizes. 1 where none is used.
int native_pairs_agree() {
#ifdef NATIVE_PAIRS
  FlushedDenormals flushed;
  uint64_t seed = 1;
  auto next = [&] { return seed = seed * 6364136223846793005u + 1442695040888963407u, (uint32_t)(seed >> 32); };
  for (int round = 0; round < 4096; round++) {
    alignas(64) float sum[16], one[16], two[16], x[2][16], w[2][16];
    alignas(64) uint32_t pairs[2][16];
    int spread = round % 2 ? 8 : 60;  // of exponents
    auto upper_half = [&] { return ((next() & 0x807f) | (127 - next() % spread) << 7) << 16; };
    for (int i = 0; i < 16; i++) {
      for (auto pair : pairs) pair[i] = upper_half() | upper_half() >> 16;
      uint32_t bits = (next() & 0x807fffff) | (127 - next() % (2 * spread)) << 23;
      memcpy(sum + i, &bits, 4);
      for (int half = 0; half < 2; half++) {
        uint32_t numbers[2] = {half ? pairs[0][i] << 16 : pairs[0][i] & 0xffff0000,
                               half ? pairs[1][i] << 16 : pairs[1][i] & 0xffff0000};
        memcpy(x[half] + i, numbers, 4), memcpy(w[half] + i, numbers + 1, 4);
      }
    }
    for (int i = 0; i < 16; i += WIDTH)
      wide_store(one + i, wide_two_products(wide_load(sum + i), pairs_load(pairs[0] + i), pairs_load(pairs[1] + i)));
    store(two, fma(load(x[1]), load(w[1]), fma(load(x[0]), load(w[0]), load(sum))));
    if (memcmp(one, two, sizeof one)) return 0;
  }
#endif
  return 1;
}

// An elementary function of x [n], n a multiple of 16: 0 exp2, 1 exp, 2 sigmoid, 3 tanh, 4 erf, 5 silu, 6 gelu, 7 gelu by
// tanh, 8 sine, 9 cosine.
void native_function(int which, const float* x, float* out, long n) {
  FlushedDenormals flushed;
  static Lanes (*const functions[])(Lanes) = {
      [](Lanes v) { return exp2_of(v); }, [](Lanes v) { return exp_of(v); },      [](Lanes v) { return sigmoid_of(v); },
      [](Lanes v) { return tanh_of(v); }, [](Lanes v) { return erf_of(v); },      [](Lanes v) { return silu_of(v); },
      [](Lanes v) { return gelu_of(v); }, [](Lanes v) { return gelu_tanh_of(v); }};
  if (which < 8) {
    for (long i = 0; i < n; i += 16) store(out + i, functions[which](load(x + i)));
    return;
  }
  for (long i = 0; i < n; i++) {
    float sine, cosine;
    sine_cosine(x[i], &sine, &cosine);
    out[i] = which == 8 ? sine : cosine;
  }
}
}
