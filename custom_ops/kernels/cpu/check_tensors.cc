#include "kernels/cpu/check_tensors.h"

#include <algorithm>

namespace qknorm {
namespace {

// Sizes that no tensor can have: products of two dimensions and byte counts stay far inside int64.
constexpr int64_t kMaxElements = int64_t{1} << 48;

bool fits(const spec::TensorRow& row, int64_t dtype, int64_t type_t) {
  switch (row.constraint) {
    case spec::Constraint::kSame:
      return dtype == type_t;
    case spec::Constraint::kSameOrFloat:
      return dtype == type_t || dtype == QKNORM_FLOAT;
    case spec::Constraint::kBoolSameOrFloat:
      return dtype == type_t || dtype == QKNORM_FLOAT || dtype == QKNORM_BOOL;
    case spec::Constraint::kInt64:
      return dtype == QKNORM_INT64;
  }
  return false;
}

std::string expected_types(const spec::TensorRow& row, int64_t type_t) {
  const std::string same = dtype_name(type_t);
  const std::string or_float = type_t == QKNORM_FLOAT ? "" : " or float32";
  switch (row.constraint) {
    case spec::Constraint::kSame:
      return same;
    case spec::Constraint::kSameOrFloat:
      return same + or_float;
    case spec::Constraint::kBoolSameOrFloat:
      return "bool, " + same + or_float;
    case spec::Constraint::kInt64:
      return "int64";
  }
  return same;
}

std::string check_dims(const char* name, const qknorm_tensor& tensor) {
  int64_t elements = 1;
  for (int64_t i = 0; i < tensor.rank; ++i) {
    const int64_t dim = tensor.dims[i];
    if (dim < 0) return std::string(name) + " has shape " + shape_text(tensor) + "; no dimension can be negative";
    if (dim > kMaxElements || elements > kMaxElements / std::max<int64_t>(dim, 1)) {
      return std::string(name) + " has shape " + shape_text(tensor) + "; that is more than 2^48 elements";
    }
    elements *= std::max<int64_t>(dim, 1);
  }
  if (tensor.data == nullptr && element_count(tensor) > 0) return std::string(name) + " has no data";
  return "";
}

}  // namespace

std::string dtype_name(int64_t dtype) {
  switch (dtype) {
    case QKNORM_FLOAT:
      return "float32";
    case QKNORM_INT64:
      return "int64";
    case QKNORM_BOOL:
      return "bool";
    case QKNORM_FLOAT16:
      return "float16";
    case QKNORM_DOUBLE:
      return "float64";
    case QKNORM_BFLOAT16:
      return "bfloat16";
    default:
      return "ONNX element type " + std::to_string(dtype);
  }
}

std::string shape_text(const Dims& dims) {
  std::string text = "(";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + ")";
}

std::string shape_text(const qknorm_tensor& tensor) {
  return shape_text(tensor.rank > 0 ? Dims(tensor.dims, tensor.dims + tensor.rank) : Dims());
}

bool has_shape(const qknorm_tensor& tensor, const Dims& dims) {
  return tensor.rank == static_cast<int64_t>(dims.size()) && std::equal(dims.begin(), dims.end(), tensor.dims);
}

int64_t element_count(const qknorm_tensor& tensor) {
  int64_t count = 1;
  for (int64_t i = 0; i < tensor.rank; ++i) count *= tensor.dims[i];
  return count;
}

std::string check_types(const spec::TensorRow* rows, int count, const qknorm_tensor* inputs, int32_t* dtype) {
  const int64_t type_t = inputs[0].dtype;
  for (int i = 0; i < count; ++i) {
    const qknorm_tensor& tensor = inputs[i];
    if (!is_given(tensor)) {
      if (!rows[i].optional) return std::string("input ") + rows[i].name + " is missing";
      continue;
    }
    if (i == 0) {
      const bool known =
          type_t == QKNORM_FLOAT || type_t == QKNORM_DOUBLE || type_t == QKNORM_FLOAT16 || type_t == QKNORM_BFLOAT16;
      if (!known) {
        return std::string(rows[i].name) + " is of type " + dtype_name(type_t) +
               "; float32, float64, float16 or bfloat16 is expected";
      }
    } else if (!fits(rows[i], tensor.dtype, type_t)) {
      return std::string(rows[i].name) + " is of type " + dtype_name(tensor.dtype) + "; " +
             expected_types(rows[i], type_t) + " is expected where " + rows[0].name + " is " + dtype_name(type_t);
    }
    if (tensor.rank < 0) return std::string(rows[i].name) + " has a negative rank";
    std::string wrong = check_dims(rows[i].name, tensor);
    if (!wrong.empty()) return wrong;
  }
  *dtype = static_cast<int32_t>(type_t);
  return "";
}

std::string check_rank(const char* name, const qknorm_tensor& tensor, int64_t rank) {
  if (tensor.rank == rank) return "";
  return std::string(name) + " has shape " + shape_text(tensor) + "; it needs " + std::to_string(rank) + " dimensions";
}

std::string check_heads(const char* name, const qknorm_tensor& tensor, int64_t num_heads) {
  if (tensor.dims[2] % num_heads == 0) return "";
  return std::string(name) + " has shape " + shape_text(tensor) + "; its last dimension must split into " +
         std::to_string(num_heads) + " heads";
}

std::string check_exact(const char* name, const qknorm_tensor& tensor, const Dims& expected) {
  if (has_shape(tensor, expected)) return "";
  return std::string(name) + " has shape " + shape_text(tensor) + "; " + shape_text(expected) + " is expected";
}

std::string broadcast(const char* name, const qknorm_tensor& tensor, const Dims& target, StridedInput* out) {
  const auto rank = static_cast<int64_t>(target.size());
  bool clash = tensor.rank > rank;
  int64_t stride = 1;
  for (int64_t i = 0; i < rank && !clash; ++i) {
    const int64_t axis = rank - 1 - i;
    const int64_t dim = i < tensor.rank ? tensor.dims[tensor.rank - 1 - i] : 1;
    clash = dim != 1 && dim != target[static_cast<size_t>(axis)];
    out->stride[axis] = dim == 1 ? 0 : stride;
    stride *= dim;
  }
  if (clash) {
    return std::string(name) + " has shape " + shape_text(tensor) + "; it must be broadcastable to " +
           shape_text(target);
  }
  out->data = tensor.data;
  out->dtype = static_cast<int32_t>(tensor.dtype);
  return "";
}

std::string head_parameter(const char* name, const qknorm_tensor& tensor, int64_t num_heads, int64_t head_size,
                           bool normalised, HeadParameter* out) {
  out->dtype = QKNORM_ABSENT;
  if (!is_given(tensor)) return "";
  if (!normalised) return std::string(name) + " is given, but there is no norm for it";
  const Dims shared = {head_size};
  const Dims split = {num_heads, head_size};
  const Dims flat = {num_heads * head_size};
  if (!has_shape(tensor, shared) && !has_shape(tensor, split) && !has_shape(tensor, flat)) {
    return std::string(name) + " has shape " + shape_text(tensor) + "; " + shape_text(shared) + ", " +
           shape_text(split) + " or " + shape_text(flat) + " is expected";
  }
  out->data = tensor.data;
  out->dtype = static_cast<int32_t>(tensor.dtype);
  out->head_stride = has_shape(tensor, shared) ? 0 : head_size;
  return "";
}

std::string rotary_table(const char* name, const qknorm_tensor& tensor, const PreparationPlan& plan, int64_t num_heads,
                         StridedInput* out) {
  if (tensor.rank < 2 || tensor.rank > 4) {
    return std::string(name) + " has shape " + shape_text(tensor) + "; (S, W), (B, S, W) or (B, H, S, W) is expected";
  }
  const int64_t size = plan.rotary.size;
  const int64_t width = tensor.dims[tensor.rank - 1];
  if (width != size && width != size / 2) {
    return std::string(name) + " has shape " + shape_text(tensor) + "; its last dimension must be " +
           std::to_string(size / 2) + " or " + std::to_string(size) + ", for " + std::to_string(size) +
           " rotated values";
  }
  if (tensor.dims[tensor.rank - 2] != plan.length) {
    return std::string(name) + " has shape " + shape_text(tensor) + "; its last dimension but one must be the " +
           std::to_string(plan.length) + " positions of the new tokens";
  }
  // A table (B, L, W) lacks the head axis that the broadcast counts from the end.
  Dims dims(tensor.dims, tensor.dims + tensor.rank);
  if (tensor.rank == 3) dims.insert(dims.begin() + 1, 1);
  const qknorm_tensor aligned = {tensor.data, dims.data(), static_cast<int64_t>(dims.size()), tensor.dtype};
  const std::string wrong = broadcast(name, aligned, {plan.batch, num_heads, plan.length, width}, out);
  if (wrong.empty()) return "";
  Dims expected = {plan.batch, plan.length, width};
  if (tensor.rank == 4) expected.insert(expected.begin() + 1, num_heads);
  return std::string(name) + " has shape " + shape_text(tensor) + "; it must be broadcastable to " +
         shape_text(expected);
}

}  // namespace qknorm
