// Norm statistics of a row and their application. Statistics are taken in C (float32 or float64) in one pass; a row
// whose squares leave C's range is done again in float64 with the largest value divided out.
#pragma once

#include "kernels/cpu/isa/storage.h"
#include "kernels/cpu/meaning.h"
#include "kernels/cpu/problem.h"

namespace qknorm {
namespace QKNORM_ISA {

struct NormStatistics {
  double mean;
  double factor;  // 1 / denominator
};

// Whether the mean of a row is subtracted from it.
QKNORM_INLINE bool centres(spec::NormKind kind) {
  switch (kind) {
    case spec::NormKind::kNone:
    case spec::NormKind::kRms:
    case spec::NormKind::kL2:
      return false;
    case spec::NormKind::kLayer:
      return true;
  }
  return false;
}

// Whether the size of a row is the root of the sum of its squares, not of their mean.
QKNORM_INLINE bool sums_squares(spec::NormKind kind) {
  switch (kind) {
    case spec::NormKind::kNone:
    case spec::NormKind::kRms:
    case spec::NormKind::kLayer:
      return false;
    case spec::NormKind::kL2:
      return true;
  }
  return false;
}

// Sums of x - shift and of its squares.
template <class C>
struct Moments {
  C sum;
  C squares;
};

// Four partial sums, or each step would wait for the one before. A sum that is not needed costs nothing.
template <class C, bool NeedSum>
QKNORM_INLINE Moments<C> moments_of(const C* x, int64_t count, C shift) {
  constexpr int kParts = 4;
  Vector<C> sums[kParts] = {};
  Vector<C> squares[kParts] = {};
  const Vector<C> shifts = broadcast(shift);
  Moments<C> tail = {0, 0};
  int64_t i = 0;
  for (; i + kParts * kLanes<C> <= count; i += kParts * kLanes<C>) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const Vector<C> shifted = load(x + i + part * kLanes<C>) - shifts;
      if constexpr (NeedSum) sums[part] += shifted;
      squares[part] += shifted * shifted;
    }
  }
  for (; i + kLanes<C> <= count; i += kLanes<C>) {
    const Vector<C> shifted = load(x + i) - shifts;
    if constexpr (NeedSum) sums[0] += shifted;
    squares[0] += shifted * shifted;
  }
  for (; i < count; ++i) {
    const C shifted = x[i] - shift;
    tail.sum += shifted;
    tail.squares += shifted * shifted;
  }
  if constexpr (NeedSum) tail.sum += sum_lanes<C>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  tail.squares += sum_lanes<C>((squares[0] + squares[1]) + (squares[2] + squares[3]));
  return tail;
}

// The square of a row's size, from the sum of its squares.
QKNORM_INLINE double square_of_size(spec::NormKind kind, double total, int64_t count) {
  return sums_squares(kind) ? total : total / static_cast<double>(count);
}

// A row's size, from parts that neither overflow nor vanish.
template <class C>
double careful_size(spec::NormKind kind, const C* x, int64_t count, double mean) {
  double largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double magnitude = __builtin_fabs(static_cast<double>(x[i]) - mean);
    if (!(magnitude <= largest)) largest = magnitude;  // a NaN is kept
  }
  if (!(largest > 0)) return largest;
  double total = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double part = (static_cast<double>(x[i]) - mean) / largest;
    total += part * part;
  }
  return largest * __builtin_sqrt(square_of_size(kind, total, count));
}

// x over max(size, TINY) of the reference: a row of zeros stays zero where epsilon is 0.
QKNORM_INLINE double norm_factor(double size, double epsilon, spec::EpsilonMode mode) {
  constexpr double tiny = 2.2250738585072014e-308;
  double denominator = __builtin_nan("");  // of a mode that the checks refuse
  switch (mode) {
    case spec::EpsilonMode::kInsideSqrt:
      denominator = epsilon > 0 ? __builtin_hypot(size, __builtin_sqrt(epsilon)) : size;
      break;
    case spec::EpsilonMode::kClamp:
      denominator = size < epsilon ? epsilon : size;
      break;
    case spec::EpsilonMode::kOutsideSqrt:
      denominator = size + epsilon;
      break;
  }
  return 1.0 / (denominator < tiny ? tiny : denominator);
}

template <class C>
NormStatistics statistics_of_sums(const PreparationPlan& plan, const C* x, int64_t count, double mean, C squares) {
  constexpr double low = sizeof(C) == 4 ? 1e-28 : 1e-280;
  constexpr double high = sizeof(C) == 4 ? 1e36 : 1e300;
  const double total = static_cast<double>(squares);
  if (!(total > low && total < high)) {
    return {mean, norm_factor(careful_size(plan.kind, x, count, mean), plan.epsilon, plan.epsilon_mode)};
  }
  const double square = square_of_size(plan.kind, total, count);
  switch (plan.epsilon_mode) {
    case spec::EpsilonMode::kInsideSqrt:
      return {mean, 1.0 / __builtin_sqrt(square + plan.epsilon)};
    case spec::EpsilonMode::kClamp:
    case spec::EpsilonMode::kOutsideSqrt:
      return {mean, norm_factor(__builtin_sqrt(square), plan.epsilon, plan.epsilon_mode)};
  }
  return {mean, __builtin_nan("")};
}

template <class C>
QKNORM_INLINE NormStatistics centred_statistics(const PreparationPlan& plan, const C* x, int64_t count) {
  // About the mean of the first and the last values: a power of two of them, so it is exact for a constant row, and an
  // outlier moves it by a part of itself only. What it is off by corrects both moments.
  constexpr int lanes = kLanes<C>;
  const C shift = count < lanes ? x[0] : sum_lanes<C>(load(x) + load(x + count - lanes)) / (2 * lanes);
  const Moments<C> moments = moments_of<C, true>(x, count, shift);
  const C off = moments.sum / static_cast<C>(count);
  const C squares = larger(moments.squares - moments.sum * off, C(0));
  return statistics_of_sums(plan, x, count, static_cast<double>(shift + off), squares);
}

template <class C>
QKNORM_INLINE NormStatistics norm_statistics(const PreparationPlan& plan, const C* x, int64_t count) {
  if (centres(plan.kind)) return centred_statistics(plan, x, count);
  return statistics_of_sums(plan, x, count, 0.0, moments_of<C, false>(x, count, C(0)).squares);
}

// A larger factor is applied in float64.
template <class C>
inline constexpr double kFactorLimit = sizeof(C) == 4 ? 1e36 : 1.7e308;

// out = (x - mean) * factor * weight + bias * bias_factor; `weight` NULL: 1, `bias` NULL: 0. `out` may be x.
template <class C>
QKNORM_INLINE void apply_statistics(const NormStatistics& statistics, const C* x, const C* weight, const C* bias,
                                    C bias_factor, int64_t count, C* out) {
  const C mean = static_cast<C>(statistics.mean);
  if (!(__builtin_fabs(statistics.factor) < kFactorLimit<C>)) {  // tiny rows without an epsilon
    for (int64_t i = 0; i < count; ++i) {
      out[i] = static_cast<C>(static_cast<double>(x[i] - mean) * statistics.factor) * (weight ? weight[i] : C(1)) +
               (bias ? bias[i] * bias_factor : C(0));
    }
    return;
  }
  const C factor = static_cast<C>(statistics.factor);
  const Vector<C> means = broadcast(mean);
  const Vector<C> factors = broadcast(factor);
  const Vector<C> bias_factors = broadcast(bias_factor);
  int64_t i = 0;
  for (; i + kLanes<C> <= count; i += kLanes<C>) {
    Vector<C> value = (load(x + i) - means) * factors;
    if (weight != nullptr) value *= load(weight + i);
    if (bias != nullptr) value += load(bias + i) * bias_factors;
    store(out + i, value);
  }
  for (; i < count; ++i) {
    out[i] = (x[i] - mean) * factor * (weight != nullptr ? weight[i] : C(1)) +
             (bias != nullptr ? bias[i] * bias_factor : C(0));
  }
}

template <class C>
QKNORM_INLINE void multiply_row(C* x, const C* by, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes<C> <= count; i += kLanes<C>) store(x + i, load(x + i) * load(by + i));
  for (; i < count; ++i) x[i] *= by[i];
}

template <class C>
QKNORM_INLINE void add_row(C* x, const C* other, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes<C> <= count; i += kLanes<C>) store(x + i, load(x + i) + load(other + i));
  for (; i < count; ++i) x[i] += other[i];
}

template <class C>
QKNORM_INLINE void multiply_row(C* x, C by, int64_t count) {
  const Vector<C> factor = broadcast(by);
  int64_t i = 0;
  for (; i + kLanes<C> <= count; i += kLanes<C>) store(x + i, load(x + i) * factor);
  for (; i < count; ++i) x[i] *= by;
}

}  // namespace QKNORM_ISA
}  // namespace qknorm
