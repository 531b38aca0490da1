// exp2 and tanh of vectors. The float versions are polynomials; the double ones call libm lane by lane, because float64
// is there for exactness.
#pragma once

#include "kernels/cpu/isa/vector.h"

namespace qknorm {
namespace QKNORM_ISA {

inline constexpr double kLog2E = 1.4426950408889634;

// 2^x for x <= 0 (up to 127 in fact); exactly 0 below -126 and for -inf, so that a masked key weighs nothing; NaN
// stays.
QKNORM_INLINE Vector<float> exp2(Vector<float> x) {
  using Bits = VectorBits<float>;
  // Adding 1.5 * 2^23 + 127 rounds x to an integer and leaves its biased exponent in the low bits.
  constexpr float magic = 12582912.0f + 127.0f;
  const Vector<float> shifted = x + magic;
  const Vector<float> fraction = x - (shifted - magic);
  Vector<float> power = broadcast(0.00015353359f);
  power = power * fraction + 0.0013398876f;
  power = power * fraction + 0.009618437f;
  power = power * fraction + 0.055503324f;
  power = power * fraction + 0.24022648f;
  power = power * fraction + 0.6931472f;
  power = power * fraction + 1.0f;
  const Vector<float> scale = reinterpret_cast<Vector<float>>(reinterpret_cast<Bits>(shifted) << 23);
  return x < -126.0f ? Vector<float>{} : power * scale;
}

QKNORM_INLINE Vector<double> exp2(Vector<double> x) {
  double lanes[kLanes<double>];
  store(lanes, x);
  for (double& lane : lanes) lane = __builtin_exp2(lane);
  return load(lanes);
}

inline constexpr float kTanh[5] = {-0.00609464131535049f, 0.020995753890290327f, -0.053850609108376135f,
                                   0.13332767760291192f, -0.3333332892452509f};

// Below 0.625 a polynomial in x^2 (fitted, error 2e-8 relative), above it (1 - e^-2x) / (1 + e^-2x).
QKNORM_INLINE Vector<float> tanh(Vector<float> x) {
  const Vector<float> magnitude = x < 0.0f ? -x : x;
  const Vector<float> square = x * x;
  Vector<float> series = broadcast(kTanh[0]);
  for (int i = 1; i < 5; ++i) series = series * square + kTanh[i];
  const Vector<float> small = x + x * square * series;
  const Vector<float> power = exp2(magnitude * static_cast<float>(-2.0 * kLog2E));
  const Vector<float> ratio = (1.0f - power) / (1.0f + power);
  return magnitude < 0.625f ? small : (x < 0.0f ? -ratio : ratio);
}

QKNORM_INLINE Vector<double> tanh(Vector<double> x) {
  double lanes[kLanes<double>];
  store(lanes, x);
  for (double& lane : lanes) lane = __builtin_tanh(lane);
  return load(lanes);
}

}  // namespace QKNORM_ISA
}  // namespace qknorm
