// The plain dtypes, fp16 and fp32: activations are float32, products go by FMA, and no tile is used.
#include "typed.h"

holdfast::AnyDecoder* holdfast::plain_decoder(const NativeModel& model, int dtype, Pool* pool) {
  if (dtype == FLOAT16) return new TypedDecoder<Half>(model, pool);
  return new TypedDecoder<float>(model, pool);
}

void holdfast::plain_product(const NativeLinear& linear, int dtype, const void* rows, long stride, int count, float* out) {
  if (dtype == FLOAT16) multiply<Half>(linear, rows, stride, count, out);
  else multiply<float>(linear, rows, stride, count, out);
}

int holdfast::plain_product_by(Pool* pool, const NativeLinear& linear, int dtype, const void* rows, long stride, int count,
                               float* out) {
  if (dtype == FLOAT16) return multiply_by<Half>(pool, linear, rows, stride, count, out);
  return multiply_by<float>(pool, linear, rows, stride, count, out);
}
