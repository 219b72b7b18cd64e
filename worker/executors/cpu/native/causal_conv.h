// Causal convolution of sixteen channels over tokens that follow one another.
//
//   out[t] = bias + w[0] in[t - width + 1] + ... + w[width - 1] in[t], by FMA, the oldest first; zeros before position 0
//
// A token has the same bits however a sequence is cut, as long as the inputs before a piece can be had.
#pragma once
#include "lanes.h"

namespace {

enum { MAX_CONV_WIDTH = 8 };

// Weights [width][channels, filled up] and bias of all channels.
struct ConvWeights {
  const float *kernel, *bias;  // bias: or null
  int channels, width;
};

// `TAPS`: the width, where it is known when compiled, or 0.
template <int TAPS, class Input, class Put>
NATIVE_INLINE void convolve_taps(const ConvWeights& conv, int c, int from, int end, Input&& input, Put&& put) {
  const long stride = (conv.channels + 15) / 16 * 16;
  const int width = TAPS ? TAPS : conv.width, before = width - 1;
  const Lanes bias = conv.bias ? load(conv.bias + c) : zero();
  Lanes weights[MAX_CONV_WIDTH], window[MAX_CONV_WIDTH];  // window: of `width` tokens, the last one the token itself
#pragma GCC unroll 8
  for (int k = 0; k < width; k++) weights[k] = load(conv.kernel + k * stride + c);
#pragma GCC unroll 8
  for (int k = 0; k < before; k++) window[k] = from - before + k < 0 ? zero() : input(from - before + k);
  for (int position = from; position < end; position++) {
    window[before] = input(position);
    Lanes sum = bias;
#pragma GCC unroll 8
    for (int k = 0; k < width; k++) sum = fma(weights[k], window[k], sum);
    put(position, window[before], sum);
#pragma GCC unroll 8
    for (int k = 0; k < before; k++) window[k] = window[k + 1];
  }
}
// Positions [from, end) of channels [c, c + 16). `input(position)` is asked for once each, from width - 1 positions before
// `from` on; `put(position, input, sum)` comes in turn with it. Weights and inputs of the widths of models stay in registers.
template <class Input, class Put>
NATIVE_INLINE void causal_conv(const ConvWeights& conv, int c, int from, int end, Input&& input, Put&& put) {
  switch (conv.width) {
    case 3: return convolve_taps<3>(conv, c, from, end, input, put);
    case 4: return convolve_taps<4>(conv, c, from, end, input, put);
    default: return convolve_taps<0>(conv, c, from, end, input, put);
  }
}

}  // namespace
