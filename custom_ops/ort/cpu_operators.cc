#include <atomic>
#include <iterator>
#include <memory>

#include "ort/attributes.h"
#include "ort/kernel_context.h"
#include "ort/operator_names.h"
#include "ort/operators.h"
#include "ort/shape_inference.h"

namespace qknorm::ort {
namespace {

std::atomic<const Api*> registered_api{nullptr};

// Gives the allocator back when the kernel goes.
class KernelMemory {
 public:
  KernelMemory(const Api& api, const OrtKernelInfo* info) : api_(api) {
    check(api_, api_.KernelInfoGetAllocator()(info, ort_abi::kMemoryDefault, &allocator_));
  }
  ~KernelMemory() { api_.ReleaseAllocator()(allocator_); }
  KernelMemory(const KernelMemory&) = delete;
  KernelMemory& operator=(const KernelMemory&) = delete;

  ort_abi::Allocator* allocator() const { return allocator_; }

 private:
  Api api_;
  ort_abi::Allocator* allocator_ = nullptr;
};

// One node of either operator: its attributes, checked once.
class Kernel {
 public:
  Kernel(const Api& api, const OrtKernelInfo* info) : api_(api), memory_(api, info) {}
  virtual ~Kernel() = default;
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  const Api& api() const { return api_; }
  virtual void compute(OrtKernelContext* context) const = 0;

 protected:
  ort_abi::Allocator* allocator() const { return memory_.allocator(); }

 private:
  Api api_;
  KernelMemory memory_;
};

class AttentionKernel final : public Kernel {
 public:
  AttentionKernel(const Api& api, const OrtKernelInfo* info) : Kernel(api, info) {
    read_attributes(api, info, spec::kAttentionAttributes, std::size(spec::kAttentionAttributes), &attributes_);
    qknorm_message message{};
    check_kernel(qknorm_cpu_check_attention_attributes(&attributes_, &message), message);
  }

  void compute(OrtKernelContext* context) const override {
    const auto inputs = read_inputs<spec::kAttentionInputCount>(api(), context);
    qknorm_message message{};
    qknorm_attention_shapes shapes{};
    check_kernel(qknorm_cpu_attention_shapes(&attributes_, inputs.data(), &shapes, &message), message);
    size_t outputs = 0;
    check(api(), api().KernelContext_GetOutputCount()(context, &outputs));
    void* y = make_output(api(), context, spec::kAttentionOutputY, outputs, shapes.y, 3);
    void* key = make_output(api(), context, spec::kAttentionOutputPresentKey, outputs, shapes.present_key, 4);
    void* value = make_output(api(), context, spec::kAttentionOutputPresentValue, outputs, shapes.present_value, 4);
    const Executor executor(api(), context, allocator());
    check_kernel(qknorm_cpu_attention(&attributes_, inputs.data(), y, key, value, executor.get(), &message), message);
  }

 private:
  spec::AttentionAttributes attributes_{};
};

class RotaryKernel final : public Kernel {
 public:
  RotaryKernel(const Api& api, const OrtKernelInfo* info) : Kernel(api, info) {
    read_attributes(api, info, spec::kRotaryAttributes, std::size(spec::kRotaryAttributes), &attributes_);
    qknorm_message message{};
    check_kernel(qknorm_cpu_check_rotary_attributes(&attributes_, &message), message);
  }

  void compute(OrtKernelContext* context) const override {
    const auto inputs = read_inputs<spec::kRotaryInputCount>(api(), context);
    const qknorm_tensor& x = inputs[spec::kRotaryInputX];
    void* y = make_output(api(), context, spec::kRotaryOutputY, 1, x.dims, static_cast<size_t>(x.rank));
    const Executor executor(api(), context, allocator());
    qknorm_message message{};
    check_kernel(qknorm_cpu_rotary(&attributes_, inputs.data(), y, executor.get(), &message), message);
  }

 private:
  spec::RotaryAttributes attributes_{};
};

// What differs between the two operators.
struct Signature {
  const char* op;
  const spec::TensorRow* inputs;
  size_t input_count;
  const spec::TensorRow* outputs;
  size_t output_count;
  OrtStatus* (*infer)(const ort_abi::CustomOp*, OrtShapeInferContext*);
  Kernel* (*create)(const Api& api, const OrtKernelInfo* info);
};

template <class K>
Kernel* create_kernel(const Api& api, const OrtKernelInfo* info) {
  return std::make_unique<K>(api, info).release();  // ONNX Runtime owns it until destroy()
}

constexpr Signature kAttention = {
    spec::kAttentionOp,          spec::kAttentionInputs, spec::kAttentionInputCount,    spec::kAttentionOutputs,
    spec::kAttentionOutputCount, infer_attention_shapes, create_kernel<AttentionKernel>};
constexpr Signature kRotary = {
    spec::kRotaryOp,          spec::kRotaryInputs, spec::kRotaryInputCount,    spec::kRotaryOutputs,
    spec::kRotaryOutputCount, infer_rotary_shapes, create_kernel<RotaryKernel>};

// ONNX Runtime sees only the base; the first field being the base makes the cast back valid.
struct Operator {
  ort_abi::CustomOp base;
  const char* name;
  const Signature* signature;
  int32_t dtype;
};

const Operator* self(const ort_abi::CustomOp* op) { return reinterpret_cast<const Operator*>(op); }

int32_t input_type(const ort_abi::CustomOp* op, size_t index) {
  switch (self(op)->signature->inputs[index].constraint) {
    case spec::Constraint::kSame:
      return self(op)->dtype;
    case spec::Constraint::kInt64:
      return QKNORM_INT64;
    case spec::Constraint::kSameOrFloat:
    case spec::Constraint::kBoolSameOrFloat:
      break;  // checked in compute
  }
  return ort_abi::kAnyType;
}

std::string node_name(const Api& api, const OrtKernelInfo* info) {
  size_t size = 0;
  if (!succeeded(api, api.KernelInfo_GetNodeName()(info, nullptr, &size))) return "";
  std::vector<char> name(size + 1, '\0');
  if (!succeeded(api, api.KernelInfo_GetNodeName()(info, name.data(), &size))) return "";
  return name.data();
}

// ONNX Runtime names the node where a run fails, but not where a kernel cannot be made.
OrtStatus* create(const ort_abi::CustomOp* op, const OrtApi* table, const OrtKernelInfo* info, void** kernel) {
  const Api api(table);
  return guarded(api, [&] {
    const Signature& signature = *self(op)->signature;
    try {
      *kernel = signature.create(api, info);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(std::string(self(op)->name) + " node '" + node_name(api, info) + "': " + error.what());
    }
  });
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  const auto* node = static_cast<const Kernel*>(kernel);
  return guarded(node->api(), [&] { node->compute(context); });
}

void destroy(void* kernel) { const std::unique_ptr<Kernel> owned(static_cast<Kernel*>(kernel)); }

int32_t characteristic(const spec::TensorRow& row) { return row.optional ? ort_abi::kOptional : ort_abi::kRequired; }

Operator make_operator(const Signature& signature, const std::string& name, int32_t dtype) {
  using ort_abi::CustomOp;
  Operator op{};
  op.name = name.c_str();
  op.signature = &signature;
  op.dtype = dtype;
  CustomOp& base = op.base;
  base.version = ort_abi::kApiVersion;
  base.get_name = [](const CustomOp* of) { return self(of)->name; };
  base.get_execution_provider = [](const CustomOp*) { return "CPUExecutionProvider"; };
  base.get_input_type = input_type;
  base.get_input_count = [](const CustomOp* of) { return self(of)->signature->input_count; };
  base.get_output_type = [](const CustomOp* of, size_t) { return self(of)->dtype; };
  base.get_output_count = [](const CustomOp* of) { return self(of)->signature->output_count; };
  base.get_input_characteristic = [](const CustomOp* of, size_t i) {
    return characteristic(self(of)->signature->inputs[i]);
  };
  base.get_output_characteristic = [](const CustomOp* of, size_t i) {
    return characteristic(self(of)->signature->outputs[i]);
  };
  base.get_input_memory_type = [](const CustomOp*, size_t) { return ort_abi::kMemoryDefault; };
  base.get_variadic_input_min_arity = [](const CustomOp*) { return 1; };
  base.get_variadic_input_homogeneity = [](const CustomOp*) { return 1; };
  base.get_variadic_output_min_arity = [](const CustomOp*) { return 1; };
  base.get_variadic_output_homogeneity = [](const CustomOp*) { return 1; };
  base.create_kernel_v2 = create;
  base.compute_v2 = compute;
  base.destroy = destroy;
  base.infer_output_shape = signature.infer;
  base.get_start_version = [](const CustomOp*) { return spec::kVersion; };
  base.get_end_version = [](const CustomOp*) { return INT32_MAX; };
  base.get_may_inplace = [](int**, int**) -> size_t { return 0; };
  base.release_may_inplace = [](int*, int*) {};
  base.get_alias_map = [](int**, int**) -> size_t { return 0; };
  base.release_alias_map = [](int*, int*) {};
  return op;
}

}  // namespace

std::vector<const ort_abi::CustomOp*> cpu_operators() {
  static const std::vector<Operator> operators = [] {
    std::vector<Operator> all;
    for (const int32_t dtype : {QKNORM_FLOAT, QKNORM_DOUBLE, QKNORM_FLOAT16, QKNORM_BFLOAT16}) {
      for (const Signature* signature : {&kAttention, &kRotary}) {
        for (const std::string& name : names_of(signature->op)) all.push_back(make_operator(*signature, name, dtype));
      }
    }
    return all;
  }();
  std::vector<const ort_abi::CustomOp*> pointers;
  for (const Operator& op : operators) pointers.push_back(&op.base);
  return pointers;
}

const Api& operator_api() { return *registered_api.load(); }

void set_operator_api(const Api& api) {
  static const Api kept = api;
  registered_api = &kept;
}

int32_t operator_dtype(const ort_abi::CustomOp* op) { return self(op)->dtype; }

}  // namespace qknorm::ort
