#include "ort/shape_inference.h"

#include <optional>
#include <vector>

#include "ort/operators.h"
#include "qknorm/generated/spec.h"

namespace qknorm::ort {
namespace {

// A number, a symbol, or neither (value < 0 and an empty symbol).
struct Dim {
  int64_t value = -1;
  std::string symbol;
};
using Shape = std::vector<Dim>;

Dim times(const Dim& dim, int64_t factor) { return dim.value < 0 ? Dim{} : Dim{dim.value * factor, ""}; }
Dim divided(const Dim& dim, int64_t parts) { return dim.value < 0 || parts < 1 ? Dim{} : Dim{dim.value / parts, ""}; }

class Context {
 public:
  Context(const Api& api, OrtShapeInferContext* context) : api_(api), context_(context) {
    check(api_, api_.ShapeInferContext_GetInputCount()(context_, &input_count_));
  }

  // No value where the input is absent or its rank is unknown.
  std::optional<Shape> input(size_t index, size_t rank) const {
    OrtTensorTypeAndShapeInfo* info = nullptr;  // borrowed: ONNX Runtime frees it
    if (index >= input_count_) return std::nullopt;
    if (!succeeded(api_, api_.ShapeInferContext_GetInputTypeShape()(context_, index, &info))) return std::nullopt;
    size_t count = 0;
    if (info == nullptr || !succeeded(api_, api_.GetDimensionsCount()(info, &count)) || count != rank) {
      return std::nullopt;
    }
    std::vector<int64_t> values(count);
    std::vector<const char*> symbols(count, nullptr);
    check(api_, api_.GetDimensions()(info, values.data(), count));
    check(api_, api_.GetSymbolicDimensions()(info, symbols.data(), count));
    Shape shape(count);
    for (size_t i = 0; i < count; ++i) {
      shape[i].value = values[i];
      if (values[i] < 0 && symbols[i] != nullptr) shape[i].symbol = symbols[i];
    }
    return shape;
  }

  // Types that share an operator's name share one schema and one of these functions: the type is the first input's.
  int32_t first_type() const {
    OrtTensorTypeAndShapeInfo* info = nullptr;
    int32_t type = ort_abi::kAnyType;
    check(api_, api_.ShapeInferContext_GetInputTypeShape()(context_, 0, &info));
    check(api_, api_.GetTensorElementType()(info, &type));
    return type;
  }

  int64_t integer(const char* name) const {
    const OrtOpAttr* attribute = nullptr;
    int64_t value = 0;
    size_t size = 0;
    check(api_, api_.ShapeInferContext_GetAttribute()(context_, name, &attribute));
    check(api_, api_.ReadOpAttr()(attribute, ort_abi::kAttributeInt, &value, sizeof(value), &size));
    return value;
  }

  // The first output, the only one that may be set: the others may be omitted, a shape for an omitted one writes beyond
  // ONNX Runtime's own list (1.24 aborts), and nothing tells how many outputs the node has.
  void set_output(const Shape& shape, int32_t dtype) const {
    std::vector<int64_t> values;
    std::vector<const char*> symbols;
    for (const Dim& dim : shape) {
      if (dim.value < 0 && dim.symbol.empty()) return;  // ONNX Runtime would take it for a size of -1
      values.push_back(dim.value);
      symbols.push_back(dim.symbol.c_str());
    }
    OrtTensorTypeAndShapeInfo* info = nullptr;
    check(api_, api_.CreateTensorTypeAndShapeInfo()(&info));
    const bool made = succeeded(api_, api_.SetTensorElementType()(info, dtype)) &&
                      succeeded(api_, api_.SetDimensions()(info, values.data(), values.size())) &&
                      succeeded(api_, api_.SetSymbolicDimensions()(info, symbols.data(), symbols.size()));
    if (made) succeeded(api_, api_.ShapeInferContext_SetOutputTypeShape()(context_, 0, info));
    api_.ReleaseTensorTypeAndShapeInfo()(info);
  }

 private:
  const Api& api_;
  OrtShapeInferContext* context_;
  size_t input_count_ = 0;
};

void infer_attention(const Context& context) {
  const std::optional<Shape> query = context.input(spec::kAttentionInputQuery, 3);
  const std::optional<Shape> value = context.input(spec::kAttentionInputValue, 3);
  if (!query || !value) return;
  const Dim value_size = divided((*value)[2], context.integer("kv_num_heads"));
  const Dim hidden = times(value_size, context.integer("q_num_heads"));
  context.set_output({(*query)[0], (*query)[1], hidden}, context.first_type());
}

}  // namespace

OrtStatus* infer_attention_shapes(const ort_abi::CustomOp*, OrtShapeInferContext* context) {
  const Api& api = operator_api();
  return guarded(api, [&] { infer_attention(Context(api, context)); });
}

OrtStatus* infer_rotary_shapes(const ort_abi::CustomOp*, OrtShapeInferContext* context) {
  const Api& api = operator_api();
  return guarded(api, [&] {
    const Context inference(api, context);
    const std::optional<Shape> x = inference.input(spec::kRotaryInputX, 3);
    if (x) inference.set_output(*x, inference.first_type());
  });
}

}  // namespace qknorm::ort
