#include "ort/cuda_operators.h"

#include <iterator>
#include <memory>
#include <vector>

#include "ort/attributes.h"
#include "ort/cuda_attention.h"
#include "ort/kernel_context.h"
#include "ort/operator_names.h"
#include "ort/shape_inference.h"

// The tests build this file for the provider that they have.
#if !defined(QKNORM_CUDA_PROVIDER)
#define QKNORM_CUDA_PROVIDER "CUDAExecutionProvider"
#endif

namespace qknorm::ort {
namespace {

using ort_abi::CustomOp;

// One node on a GPU. What can be missing is asked for when the session is made, not when it runs.
class CudaKernel {
 public:
  CudaKernel(const Api& api, const OrtKernelInfo* info) : api_(api) {
    cuda::driver();
    pack_ = &cuda::shared_pack();
    check(api_, api_.KernelInfoGetAllocator()(info, ort_abi::kMemoryDefault, &allocator_));
  }
  virtual ~CudaKernel() { api_.ReleaseAllocator()(allocator_); }
  CudaKernel(const CudaKernel&) = delete;
  CudaKernel& operator=(const CudaKernel&) = delete;

  const Api& api() const { return api_; }
  virtual void compute(OrtKernelContext* context) const = 0;

 protected:
  // ONNX Runtime's stream and its arena: a block given back is used again only by later work of the stream.
  cuda::Target target(const OrtKernelContext* context) const {
    void* stream = nullptr;
    check(api_, api_.KernelContext_GetGPUComputeStream()(context, &stream));
    const cuda::Memory memory = {allocator_,
                                 [](void* of, size_t bytes) {
                                   auto* allocator = static_cast<ort_abi::Allocator*>(of);
                                   return allocator->alloc(allocator, bytes);
                                 },
                                 [](void* of, void* block) {
                                   auto* allocator = static_cast<ort_abi::Allocator*>(of);
                                   allocator->free(allocator, block);
                                 }};
    return {pack_, static_cast<cuda::Stream>(stream), memory};
  }

  static void require_served(const std::string& reason) {
    if (!reason.empty()) throw InvalidArgument(reason);
  }

 private:
  Api api_;
  cuda::Pack* pack_ = nullptr;
  ort_abi::Allocator* allocator_ = nullptr;
};

class CudaAttention final : public CudaKernel {
 public:
  CudaAttention(const Api& api, const OrtKernelInfo* info, int32_t dtype) : CudaKernel(api, info) {
    read_attributes(api, info, spec::kAttentionAttributes, std::size(spec::kAttentionAttributes), &attributes_);
    qknorm_message message{};
    check_kernel(qknorm_cpu_check_attention_attributes(&attributes_, &message), message);
    require_served(cuda::refusal(attributes_, dtype));
  }

  void compute(OrtKernelContext* context) const override {
    const auto inputs = read_inputs<spec::kAttentionInputCount>(api(), context);
    const qknorm_attention_shapes shapes = cuda::attention_shapes(attributes_, inputs.data());
    size_t outputs = 0;
    check(api(), api().KernelContext_GetOutputCount()(context, &outputs));
    void* y = make_output(api(), context, spec::kAttentionOutputY, outputs, shapes.y, 3);
    void* key = make_output(api(), context, spec::kAttentionOutputPresentKey, outputs, shapes.present_key, 4);
    void* value = make_output(api(), context, spec::kAttentionOutputPresentValue, outputs, shapes.present_value, 4);
    cuda::run_attention(attributes_, inputs.data(), y, key, value, target(context));
  }

 private:
  spec::AttentionAttributes attributes_{};
};

class CudaRotary final : public CudaKernel {
 public:
  CudaRotary(const Api& api, const OrtKernelInfo* info, int32_t dtype) : CudaKernel(api, info) {
    read_attributes(api, info, spec::kRotaryAttributes, std::size(spec::kRotaryAttributes), &attributes_);
    qknorm_message message{};
    check_kernel(qknorm_cpu_check_rotary_attributes(&attributes_, &message), message);
    require_served(cuda::refusal(attributes_, dtype));
  }

  void compute(OrtKernelContext* context) const override {
    const auto inputs = read_inputs<spec::kRotaryInputCount>(api(), context);
    const qknorm_tensor& x = inputs[spec::kRotaryInputX];
    void* y = make_output(api(), context, spec::kRotaryOutputY, 1, x.dims, static_cast<size_t>(x.rank));
    cuda::run_rotary(attributes_, inputs.data(), y, target(context));
  }

 private:
  spec::RotaryAttributes attributes_{};
};

// ONNX Runtime sees only the base; the first field being the base makes the cast back valid.
struct CudaOperator {
  CustomOp base;
  const char* name;
  bool is_attention;
  int32_t dtype;
};

const CudaOperator* self(const CustomOp* op) { return reinterpret_cast<const CudaOperator*>(op); }
const char* name_of(const CustomOp* op) { return self(op)->name; }
const spec::TensorRow& input_row(const CustomOp* op, size_t i) {
  return self(op)->is_attention ? spec::kAttentionInputs[i] : spec::kRotaryInputs[i];
}

int32_t input_type(const CustomOp* op, size_t index) {
  switch (input_row(op, index).constraint) {
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

OrtStatus* create(const CustomOp* op, const OrtApi* table, const OrtKernelInfo* info, void** kernel) {
  const Api api(table);
  return guarded(api, [&] {
    try {
      std::unique_ptr<CudaKernel> made;
      if (self(op)->is_attention) {
        made = std::make_unique<CudaAttention>(api, info, self(op)->dtype);
      } else {
        made = std::make_unique<CudaRotary>(api, info, self(op)->dtype);
      }
      *kernel = made.release();  // ONNX Runtime owns it until destroy()
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(std::string(name_of(op)) + " on CUDAExecutionProvider: " + error.what());
    } catch (const std::exception& error) {
      throw std::runtime_error(std::string(name_of(op)) + " on CUDAExecutionProvider: " + error.what());
    }
  });
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  const auto* node = static_cast<const CudaKernel*>(kernel);
  return guarded(node->api(), [&] {
    try {
      node->compute(context);
    } catch (const std::invalid_argument& error) {
      throw InvalidArgument(error.what());
    }
  });
}

int32_t characteristic(const spec::TensorRow& row) { return row.optional ? ort_abi::kOptional : ort_abi::kRequired; }

CudaOperator make_operator(bool is_attention, const std::string& name, int32_t dtype) {
  CudaOperator op{{}, name.c_str(), is_attention, dtype};
  CustomOp& base = op.base;
  base.version = ort_abi::kApiVersion;
  base.get_name = name_of;
  base.get_execution_provider = [](const CustomOp*) { return QKNORM_CUDA_PROVIDER; };
  base.get_input_type = input_type;
  base.get_input_count = [](const CustomOp* of) -> size_t {
    return self(of)->is_attention ? size_t{spec::kAttentionInputCount} : size_t{spec::kRotaryInputCount};
  };
  base.get_output_type = [](const CustomOp* of, size_t) { return self(of)->dtype; };
  base.get_output_count = [](const CustomOp* of) -> size_t {
    return self(of)->is_attention ? size_t{spec::kAttentionOutputCount} : size_t{spec::kRotaryOutputCount};
  };
  base.get_input_characteristic = [](const CustomOp* of, size_t i) { return characteristic(input_row(of, i)); };
  base.get_output_characteristic = [](const CustomOp* of, size_t i) {
    return characteristic(self(of)->is_attention ? spec::kAttentionOutputs[i] : spec::kRotaryOutputs[i]);
  };
  base.get_input_memory_type = [](const CustomOp*, size_t) { return ort_abi::kMemoryDefault; };
  base.get_variadic_input_min_arity = [](const CustomOp*) { return 1; };
  base.get_variadic_input_homogeneity = [](const CustomOp*) { return 1; };
  base.get_variadic_output_min_arity = [](const CustomOp*) { return 1; };
  base.get_variadic_output_homogeneity = [](const CustomOp*) { return 1; };
  base.create_kernel_v2 = create;
  base.compute_v2 = compute;
  base.destroy = [](void* kernel) { const std::unique_ptr<CudaKernel> owned(static_cast<CudaKernel*>(kernel)); };
  base.infer_output_shape = is_attention ? infer_attention_shapes : infer_rotary_shapes;
  base.get_start_version = [](const CustomOp*) { return spec::kVersion; };
  base.get_end_version = [](const CustomOp*) { return INT32_MAX; };
  base.get_may_inplace = [](int**, int**) -> size_t { return 0; };
  base.release_may_inplace = [](int*, int*) {};
  base.get_alias_map = [](int**, int**) -> size_t { return 0; };
  base.release_alias_map = [](int*, int*) {};
  return op;
}

const std::vector<CudaOperator>& operators() {
  static const std::vector<CudaOperator> all = [] {
    std::vector<CudaOperator> made;
    for (const int32_t dtype : {QKNORM_FLOAT, QKNORM_FLOAT16, QKNORM_BFLOAT16}) {
      for (const std::string& name : names_of(spec::kAttentionOp)) made.push_back(make_operator(true, name, dtype));
      for (const std::string& name : names_of(spec::kRotaryOp)) made.push_back(make_operator(false, name, dtype));
    }
    return made;
  }();
  return all;
}

}  // namespace

std::vector<const CustomOp*> cuda_operators() {
  std::vector<const CustomOp*> pointers;
  for (const CudaOperator& op : operators()) pointers.push_back(&op.base);
  return pointers;
}

int32_t cuda_operator_dtype(const CustomOp* op) { return self(op)->dtype; }

}  // namespace qknorm::ort
