// What the enumerated fields of the spec say, each as one switch without a default: a value that is added to the spec
// does not compile before somebody has said here, and in the stages that compute it, what it means.
//
// check.cc refuses every integer that is no enumerator, so what stands behind a switch is never reached; it is defined
// all the same. Forced inline, because these are shared by instruction sets whose code must not be.
#pragma once

#include "qknorm/generated/spec.h"

#define QKNORM_MEANING constexpr __attribute__((always_inline)) inline

namespace qknorm {

QKNORM_MEANING bool normalises(spec::NormKind kind) {
  switch (kind) {
    case spec::NormKind::kNone:
      return false;
    case spec::NormKind::kRms:
    case spec::NormKind::kLayer:
    case spec::NormKind::kL2:
      return true;
  }
  return false;
}

// Whether a row is all heads of a token, not one head.
QKNORM_MEANING bool spans_heads(spec::NormAxis axis) {
  switch (axis) {
    case spec::NormAxis::kHead:
      return false;
    case spec::NormAxis::kHidden:
      return true;
  }
  return false;
}

// Whether a normalised row is rounded to the tensor's type before its gain multiplies.
QKNORM_MEANING bool rounds_before_weight(spec::NormWeightOrder order) {
  switch (order) {
    case spec::NormWeightOrder::kBeforeCast:
      return false;
    case spec::NormWeightOrder::kAfterCast:
      return true;
  }
  return false;
}

QKNORM_MEANING bool rotates_before_norm(spec::RotaryOrder order) {
  switch (order) {
    case spec::RotaryOrder::kNone:
    case spec::RotaryOrder::kAfterNorm:
      return false;
    case spec::RotaryOrder::kBeforeNorm:
      return true;
  }
  return false;
}

QKNORM_MEANING bool rotates_after_norm(spec::RotaryOrder order) {
  switch (order) {
    case spec::RotaryOrder::kNone:
    case spec::RotaryOrder::kBeforeNorm:
      return false;
    case spec::RotaryOrder::kAfterNorm:
      return true;
  }
  return false;
}

QKNORM_MEANING bool rotates(spec::RotaryOrder order) { return rotates_before_norm(order) || rotates_after_norm(order); }

// Whether logits and softmax need float64 in a node whose type is narrower; float32 is always there.
QKNORM_MEANING bool needs_float64(spec::SoftmaxPrecision precision) {
  switch (precision) {
    case spec::SoftmaxPrecision::kFloat64:
      return true;
    case spec::SoftmaxPrecision::kFloat32:
    case spec::SoftmaxPrecision::kFloat16:
    case spec::SoftmaxPrecision::kBfloat16:
      return false;
  }
  return false;
}

}  // namespace qknorm
