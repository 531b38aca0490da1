// The operators that the library registers: one OrtCustomOp for each operator and type.
#pragma once

#include <vector>

#include "ort/status.h"

namespace qknorm::ort {

// All operators, as they are handed to ONNX Runtime; they live as long as the library.
std::vector<const ort_abi::CustomOp*> cpu_operators();

// The API that ONNX Runtime gave at registration; shape inference gets no other.
const Api& operator_api();
void set_operator_api(const Api& api);

// The type T of one of `cpu_operators`.
int32_t operator_dtype(const ort_abi::CustomOp* op);

}  // namespace qknorm::ort
