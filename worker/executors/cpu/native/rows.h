// Rows of numbers: buffers of them, norms, activations and rotation, each for one row.
// Who computes which rows, and when, is in `step.h`.
#pragma once
#include <sys/mman.h>

#include <new>
#include <utility>

#include "decoder.h"
#include "functions.h"

namespace {

// The position of a row in its prompt, and the text that it is of: 0, or 1 for the second of two.
struct RowPlace {
  int position, segment;
};

inline long stride_of(long columns) { return (columns + 31) / 32 * 32 + 32; }
// Of a row of sums that lie beside each other, each in a stride of its own.
inline long sum_columns(int hidden, int parts) { return parts == 1 ? hidden : parts * stride_of(hidden); }

// A [rows][columns] buffer, zeroed, in large pages where it is large, with rows aligned and set apart from powers of two.
template <class T> struct Buffer {
  T* data = nullptr;
  void* mapped = nullptr;
  long stride = 0, bytes = 0;
  Buffer() = default;
  Buffer(long rows, long columns) : stride(stride_of(columns)) {
    const size_t LARGE_PAGE = 2 << 20;
    bytes = rows * stride * sizeof(T) + LARGE_PAGE;
    mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);  // zeros, by the system
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    data = (T*)(((uintptr_t)mapped + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE);
    if (bytes >= 2 * LARGE_PAGE) madvise(data, bytes - LARGE_PAGE, MADV_HUGEPAGE);
  }
  Buffer(Buffer&& other) { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) {
    std::swap(data, other.data), std::swap(mapped, other.mapped);
    std::swap(stride, other.stride), std::swap(bytes, other.bytes);
    return *this;
  }
  ~Buffer() {
    if (data) munmap(mapped, bytes);
  }
  T* row(long r) const { return data + r * stride; }
};

// Numbers [c, c + count) of those that each slice of a row of inputs has `length` of, first; a slice is filled up.
template <class Input> inline void put_in_slices(Input* out, int length, int filled, int c, int count, Lanes v) {
  alignas(64) Input rounded[16];
  store(rounded, v);
  for (int from = 0; from < count;) {
    const int slice = (c + from) / length, within = (c + from) % length, some = std::min(count - from, length - within);
    memcpy((void*)(out + (long)slice * filled + within), rounded + from, some * sizeof(Input));
    from += some;
  }
}

// The norm of x [n]; x and the weights are readable up to a multiple of 16. Four sums, added pairwise.
template <class Out> NATIVE_INLINE void norm_row(const float* x, const NativeNorm& norm, int n, Out* out) {
  Lanes mean = zero(), sum[4];
  if (norm.is_layer_norm) {
    for (auto& s : sum) s = zero();
    for (int i = 0, k = 0; i < n; i += 16, k++) sum[k % 4] = sum[k % 4] + tail_of(x + i, n - i);
    mean = all(sum_of((sum[0] + sum[1]) + (sum[2] + sum[3])) / (float)n);
  }
  for (auto& s : sum) s = zero();
  for (int i = 0, k = 0; i < n; i += 16, k++) {
    Lanes v = tail_of(x + i, n - i);
    if (norm.is_layer_norm) v = keep_range(v - mean, 0, n - i, zero());
    sum[k % 4] = fma(v, v, sum[k % 4]);
  }
  float square = sum_of((sum[0] + sum[1]) + (sum[2] + sum[3])) / (float)n;
  Lanes inverse = all(1.0f / square_root(square + norm.eps));
  for (int i = 0; i < n; i += 16) {
    Lanes v = tail_of(x + i, n - i);
    if (norm.is_layer_norm) v = keep_range(v - mean, 0, n - i, zero());
    v = v * inverse * tail_of(norm.weight + i, n - i);
    if (norm.bias) v = v + tail_of(norm.bias + i, n - i);
    store(out + i, v);
  }
}

NATIVE_INLINE Lanes activated(int activation, Lanes gate) {
  switch (activation) {
    case 0: return silu_of(gate);
    case 1: return gelu_of(gate);
    case 2: return gelu_tanh_of(gate);
    case 3: return larger(zero(), gate);
    default: return larger(zero(), gate) * larger(zero(), gate);
  }
}
enum { CLAMPED_SWIGLU = 5 };
NATIVE_INLINE Lanes gated(int activation, Lanes gate, Lanes up) {
  if (activation != CLAMPED_SWIGLU) return activated(activation, gate) * up;
  gate = smaller(all(7.0f), gate), up = larger(all(-7.0f), smaller(all(7.0f), up));
  return (up + all(1.0f)) * (gate * sigmoid_of(gate * all(1.702f)));
}

// An RMSNorm of x [n], of which [first, first + count) is wanted.
NATIVE_INLINE void whole_norm_row(const float* x, const NativeNorm& norm, int n, int first, int count, float* out) {
  Lanes sum[4];
  for (auto& s : sum) s = zero();
  for (int i = 0, k = 0; i < n; i += 16, k++) {
    Lanes v = tail_of(x + i, n - i);
    sum[k % 4] = fma(v, v, sum[k % 4]);
  }
  float inverse = 1.0f / square_root(sum_of((sum[0] + sum[1]) + (sum[2] + sum[3])) / (float)n + norm.eps);
  for (int i = 0; i < count; i++) out[i] = x[first + i] * inverse * norm.weight[first + i];
}

NATIVE_INLINE float element(Bf16 v) {
  uint32_t bits = (uint32_t)v.bits << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
NATIVE_INLINE float element(Half v) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_set1_epi16((short)v.bits))); }
NATIVE_INLINE float element(float v) { return v; }

NATIVE_INLINE void fill_rotary(NativeRotary& rotary, int positions) {
  for (int p = rotary.filled; p < positions; p++) {
    float* row = rotary.table + (long)p * 2 * rotary.pairs;
    for (int i = 0; i < rotary.pairs; i++) {
      float sine, cosine;
      sine_cosine((float)p * rotary.inverse_frequencies[i], &sine, &cosine);
      row[i] = sine * rotary.scaling, row[rotary.pairs + i] = cosine * rotary.scaling;
    }
  }
  rotary.filled = std::max(rotary.filled, positions);
}

// Turns the pairs of one head by the angles of its position.
NATIVE_INLINE void rotate(const NativeRotary& rotary, int position, float* v) {
  const float *sines = rotary.table + (long)position * 2 * rotary.pairs, *cosines = sines + rotary.pairs;
  if (!rotary.interleaved && rotary.pairs % 16 == 0) {
    for (int i = 0; i < rotary.pairs; i += 16) {
      Lanes a = load(v + i), b = load(v + rotary.pairs + i), s = load(sines + i), c = load(cosines + i);
      store(v + i, minus_fma(b, s, a * c)), store(v + rotary.pairs + i, fma(a, s, b * c));
    }
    return;
  }
  for (int i = 0; i < rotary.pairs; i++) {
    float* first = rotary.interleaved ? v + 2 * i : v + i;
    float* second = rotary.interleaved ? first + 1 : first + rotary.pairs;
    float a = *first, b = *second;
    *first = scalar_fma(-b, sines[i], a * cosines[i]), *second = scalar_fma(a, sines[i], b * cosines[i]);
  }
}

}  // namespace
