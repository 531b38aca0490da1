// Output shapes while a model is loaded: symbols go through, so that what follows a fused node knows its shape.
#pragma once

#include "ort/status.h"

namespace qknorm::ort {

OrtStatus* infer_attention_shapes(const ort_abi::CustomOp* op, OrtShapeInferContext* context);
OrtStatus* infer_rotary_shapes(const ort_abi::CustomOp* op, OrtShapeInferContext* context);

}  // namespace qknorm::ort
