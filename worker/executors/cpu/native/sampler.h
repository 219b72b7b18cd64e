// The sampler's plain data, as Python fills it in (`structures.py` mirrors this file).
// How a token is drawn is in `sampler.cpp`; what each setting means to a user, in docs/sampling.md.
#pragma once
#include "draw_records.h"

extern "C" {

// Edits of one row before it is drawn from. Token ids that the row does not have do nothing.
struct NativeEdits {
  const unsigned char* mask;  // a bit for each token, the lowest first: it may come next; or null
  const long* allowed;        // or null: all are
  const long* banned;
  const long* biased;
  const float* biases;
  const long* outputs;  // the output so far, where a penalty counts it
  const long* prompt;   // distinct tokens
  long mask_bits, num_allowed, num_banned, num_biased, num_outputs, num_prompt;
  int penalize;
  NativePenalties penalties;
};

struct NativeDrawn {
  int token;  // -1: the row has a NaN, or its best logit is infinite
  int rank;
  float logprob;
  int num_top;
};
}
