// Elementary functions of sixteen lanes, of our own, so that their bits are the same on every machine and libm.
// Errors are about 1 ulp (exp2, erf) or 3 (tanh). NaN stays NaN: of two numbers of which one is NaN `larger`
// and `smaller` take the second, so a limit stands first. What uses them does not live here.
#pragma once
#include "lanes.h"

namespace {

// 2^y for y <= 127; 0 where it is no normal number. A polynomial of degree 6 on [-1/2, 1/2].
NATIVE_INLINE Lanes exp2_of(Lanes y) {
  Lanes f, n = split(y, f);
  Lanes p = all(1.5403530e-4f);
  p = fma(p, f, all(1.3333558e-3f));
  p = fma(p, f, all(9.6181291e-3f));
  p = fma(p, f, all(5.5504109e-2f));
  p = fma(p, f, all(2.4022651e-1f));
  p = fma(p, f, all(6.9314718e-1f));
  p = fma(p, f, all(1.0f));
  return times_power(p, n);
}

const float LOG2_E = 1.44269504f;

NATIVE_INLINE Lanes exp_of(Lanes x) { return exp2_of(smaller(all(127.0f), x * all(LOG2_E))); }
NATIVE_INLINE Lanes sigmoid_of(Lanes x) { return all(1.0f) / (all(1.0f) + exp_of(all(0.0f) - x)); }
NATIVE_INLINE Lanes silu_of(Lanes x) { return x * sigmoid_of(x); }
// Up to 0.625 a polynomial (the one of Cephes), beyond 1 - 2 / (e^2x + 1); e^2x is finite up to the clamp.
NATIVE_INLINE Lanes tanh_of(Lanes x) {
  Lanes clamped = larger(all(-20.0f), smaller(all(20.0f), x)), s = x * x;
  Lanes far = all(1.0f) - all(2.0f) / (exp_of(clamped + clamped) + all(1.0f));
  Lanes near = fma(all(-5.70498872745e-3f), s, all(2.06390887954e-2f));
  near = fma(near, s, all(-5.37397155531e-2f));
  near = fma(near, s, all(1.33314422036e-1f));
  near = fma(near, s, all(-3.33332819422e-1f));
  return where_above(absolute(x), all(0.625f), far, fma(near * s, x, x));
}
// Two polynomials, below and above 475/512 (after N. Juffa's single-precision erf).
NATIVE_INLINE Lanes erf_of(Lanes x) {
  Lanes t = absolute(x), s = x * x;
  Lanes far = fma(all(-1.72853470e-5f), t, all(3.83197126e-4f));
  far = fma(far, s, fma(all(-3.88396438e-3f), t, all(2.42546219e-2f)));
  far = fma(far, t, all(-1.06777877e-1f));
  far = fma(far, t, all(-6.34846687e-1f));
  far = fma(far, t, all(-1.28717512e-1f));
  far = fma(far, t, all(0.0f) - t);
  far = with_sign_of(all(1.0f) - exp_of(far), x);
  Lanes near = all(-5.96761703e-4f);
  near = fma(near, s, all(4.99119423e-3f));
  near = fma(near, s, all(-2.67681349e-2f));
  near = fma(near, s, all(1.12819925e-1f));
  near = fma(near, s, all(-3.76125336e-1f));
  near = fma(near, s, all(1.28379166e-1f));
  near = fma(near, x, x);
  return where_above(t, all(0.927734375f), far, near);
}
NATIVE_INLINE Lanes gelu_of(Lanes x) { return x * all(0.5f) * (all(1.0f) + erf_of(x * all(0.70710678f))); }
NATIVE_INLINE Lanes gelu_tanh_of(Lanes x) {
  Lanes inner = all(0.79788456f) * fma(all(0.044715f) * x * x, x, x);
  return x * all(0.5f) * (all(1.0f) + tanh_of(inner));
}

// The exponentials of the 64 logits of a block less the best of them, summed; -inf adds nothing. `best` is finite.
NATIVE_INLINE float block_mass(const Lanes* logits, float best) {
  Lanes part[4];
  for (int i = 0; i < 4; i++) part[i] = exp2_of((logits[i] - all(best)) * all(LOG2_E));
  return sum_of((part[0] + part[1]) + (part[2] + part[3]));
}

// Sine and cosine of a float angle, computed in double precision and rounded once.
NATIVE_INLINE void sine_cosine(float angle, float* sine, float* cosine) {
  double x = angle, n = _mm_cvtsd_f64(_mm_round_sd(_mm_set_sd(0), _mm_set_sd(x * 0.63661977236758134), 8));
  double r = scalar_fma(n, -1.5707963267948966, x);
  r = scalar_fma(n, -6.123233995736766e-17, r);
  double z = r * r;
  double s = scalar_fma(z, 1.58962301576546568e-10, -2.50507477628578072e-8);
  s = scalar_fma(z, s, 2.75573136213857245e-6);
  s = scalar_fma(z, s, -1.98412698295895386e-4);
  s = scalar_fma(z, s, 8.33333333332211859e-3);
  s = scalar_fma(z, s, -1.66666666666666307e-1);
  s = scalar_fma(z * r, s, r);
  double c = scalar_fma(z, -1.13585365213876817e-11, 2.08757008419747316e-9);
  c = scalar_fma(z, c, -2.75573141792967388e-7);
  c = scalar_fma(z, c, 2.48015872888517045e-5);
  c = scalar_fma(z, c, -1.38888888888730564e-3);
  c = scalar_fma(z, c, 4.16666666666665929e-2);
  c = scalar_fma(z * z, c, scalar_fma(z, -0.5, 1.0));
  long quarter = (long)n & 3;
  double sin_out = quarter & 1 ? c : s, cos_out = quarter & 1 ? s : c;
  *sine = (float)(quarter & 2 ? -sin_out : sin_out);
  *cosine = (float)(quarter == 1 || quarter == 2 ? -cos_out : cos_out);
}

}  // namespace
