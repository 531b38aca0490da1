// Checks of single tensors: types, ranks, shapes, broadcasting. Each returns an empty string or a message.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "kernels/cpu/problem.h"

namespace qknorm {

using Dims = std::vector<int64_t>;

inline bool is_given(const qknorm_tensor& tensor) { return tensor.dtype != QKNORM_ABSENT; }

std::string dtype_name(int64_t dtype);
std::string shape_text(const qknorm_tensor& tensor);
std::string shape_text(const Dims& dims);
bool has_shape(const qknorm_tensor& tensor, const Dims& dims);
int64_t element_count(const qknorm_tensor& tensor);

// Types, required inputs, negative or overflowing dimensions of all inputs; `dtype` receives the type T of the first.
std::string check_types(const spec::TensorRow* rows, int count, const qknorm_tensor* inputs, int32_t* dtype);

std::string check_rank(const char* name, const qknorm_tensor& tensor, int64_t rank);
std::string check_heads(const char* name, const qknorm_tensor& tensor, int64_t num_heads);
std::string check_exact(const char* name, const qknorm_tensor& tensor, const Dims& expected);

// Strides of a tensor that is broadcast to `target` (4 dimensions, aligned at the last one).
std::string broadcast(const char* name, const qknorm_tensor& tensor, const Dims& target, StridedInput* out);

// A gain or bias of shape (D), (H, D) or (H * D).
std::string head_parameter(const char* name, const qknorm_tensor& tensor, int64_t num_heads, int64_t head_size,
                           bool normalised, HeadParameter* out);

// cos or sin: (L, W), (B, L, W) or (B, H, L, W).
std::string rotary_table(const char* name, const qknorm_tensor& tensor, const PreparationPlan& plan, int64_t num_heads,
                         StridedInput* out);

}  // namespace qknorm
