// The plain dtypes, fp16 and fp32: activations are float32, products go by FMA, and no tile is used.
#include "typed.h"

holdfast::AnyDecoder* holdfast::plain_decoder(const NativeModel& model, int dtype, Pool* pool) {
  if (dtype == FLOAT16) return new TypedDecoder<Half>(model, pool);
  return new TypedDecoder<float>(model, pool);
}

holdfast::AnyAttention* holdfast::plain_attention(const NativeAttention* layers, int num_layers, int block_size,
                                                  int dtype, Pool* pool) {
  if (dtype == FLOAT16) return new PagedAttention<Half>(layers, num_layers, block_size, pool);
  return new PagedAttention<float>(layers, num_layers, block_size, pool);
}

int holdfast::plain_product(Pool* pool, const NativeLinear& linear, int dtype, const void* rows, long stride, int count,
                            float* out) {
  if (dtype == FLOAT16) return multiply<Half>(pool, linear, rows, stride, count, out);
  return multiply<float>(pool, linear, rows, stride, count, out);
}

void holdfast::plain_added(const NativeAdapted& adapted, int dtype, const void* row, int slices, long length,
                           int groups, float* out) {
  if (dtype == FLOAT16) return added_alone<Half>(adapted, row, slices, length, groups, out);
  return added_alone<float>(adapted, row, slices, length, groups, out);
}
