// Inputs, outputs, threads and memory of one call, as the kernels' plain C door takes them.
#pragma once

#include <array>

#include "ort/status.h"
#include "qknorm/qk_norm_params.h"

namespace qknorm::ort {

// The tensor of an input; dtype QKNORM_ABSENT for an optional one that is not connected.
qknorm_tensor read_input(const Api& api, const OrtKernelContext* context, size_t index);

template <int Count>
std::array<qknorm_tensor, Count> read_inputs(const Api& api, const OrtKernelContext* context) {
  size_t given = 0;
  check(api, api.KernelContext_GetInputCount()(context, &given));
  std::array<qknorm_tensor, Count> inputs{};
  for (size_t i = 0; i < Count && i < given; ++i) inputs[i] = read_input(api, context, i);
  return inputs;
}

// Memory of an output; NULL for an optional one that nobody asked for.
void* make_output(const Api& api, OrtKernelContext* context, size_t index, size_t given, const int64_t* dims,
                  size_t rank);

// ONNX Runtime's own threads and allocator behind a qknorm_executor.
class Executor {
 public:
  Executor(const Api& api, const OrtKernelContext* context, ort_abi::Allocator* allocator);
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  const qknorm_executor* get() const { return &executor_; }

 private:
  static void parallel_for(void* self, int64_t count, void (*task)(void* argument, int64_t index), void* argument);
  static void* allocate(void* self, size_t bytes);
  static void release(void* self, void* memory);

  const Api& api_;
  const OrtKernelContext* context_;
  ort_abi::Allocator* allocator_;
  qknorm_executor executor_;
};

// Throws InvalidArgument or a runtime error for a status of the plain C door.
void check_kernel(int32_t status, const qknorm_message& message);

}  // namespace qknorm::ort
