// The operators for CUDAExecutionProvider. They can be registered on a machine without a driver: it is looked for when
// a session makes a kernel.
#pragma once

#include <vector>

#include "ort/status.h"

namespace qknorm::ort {

// As `cpu_operators`: one for each operator and type that has CUDA kernels.
std::vector<const ort_abi::CustomOp*> cuda_operators();

// The type T of one of `cuda_operators`.
int32_t cuda_operator_dtype(const ort_abi::CustomOp* op);

}  // namespace qknorm::ort
