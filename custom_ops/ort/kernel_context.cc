#include "ort/kernel_context.h"

#include <thread>

namespace qknorm::ort {
namespace {

struct Work {
  void (*task)(void* argument, int64_t index);
  void* argument;
};

int64_t processors() {
  static const int64_t count = static_cast<int64_t>(std::thread::hardware_concurrency());
  return count < 1 ? 1 : count;
}

}  // namespace

qknorm_tensor read_input(const Api& api, const OrtKernelContext* context, size_t index) {
  const OrtValue* value = nullptr;
  check(api, api.KernelContext_GetInput()(context, index, &value));
  if (value == nullptr) return {};
  int32_t type = 0;
  const int64_t* dims = nullptr;
  size_t rank = 0;
  check(api, api.GetTensorElementTypeAndShapeDataReference()(value, &type, &dims, &rank));
  void* data = nullptr;
  // The only accessor of every version takes a mutable value; inputs are not written through it.
  check(api, api.GetTensorMutableData()(const_cast<OrtValue*>(value), &data));
  return {data, dims, static_cast<int64_t>(rank), type};
}

void* make_output(const Api& api, OrtKernelContext* context, size_t index, size_t given, const int64_t* dims,
                  size_t rank) {
  if (index >= given) return nullptr;
  OrtValue* value = nullptr;
  check(api, api.KernelContext_GetOutput()(context, index, dims, rank, &value));
  if (value == nullptr) return nullptr;
  void* data = nullptr;
  check(api, api.GetTensorMutableData()(value, &data));
  return data;
}

Executor::Executor(const Api& api, const OrtKernelContext* context, ort_abi::Allocator* allocator)
    : api_(api),
      context_(context),
      allocator_(allocator),
      executor_{this, &Executor::parallel_for, &Executor::allocate, &Executor::release, processors()} {}

void Executor::parallel_for(void* self, int64_t count, void (*task)(void* argument, int64_t index), void* argument) {
  const auto* executor = static_cast<const Executor*>(self);
  Work work = {task, argument};
  const auto run = [](void* of, size_t index) {
    const Work* w = static_cast<const Work*>(of);
    w->task(w->argument, static_cast<int64_t>(index));
  };
  OrtStatus* status =
      executor->api_.KernelContext_ParallelFor()(executor->context_, run, static_cast<size_t>(count), 0, &work);
  if (!succeeded(executor->api_, status)) {
    for (int64_t i = 0; i < count; ++i) task(argument, i);
  }
}

void* Executor::allocate(void* self, size_t bytes) {
  ort_abi::Allocator* allocator = static_cast<const Executor*>(self)->allocator_;
  return allocator->alloc(allocator, bytes);
}

void Executor::release(void* self, void* memory) {
  ort_abi::Allocator* allocator = static_cast<const Executor*>(self)->allocator_;
  allocator->free(allocator, memory);
}

void check_kernel(int32_t status, const qknorm_message& message) {
  if (status == QKNORM_OK) return;
  if (status == QKNORM_INVALID_ARGUMENT) throw InvalidArgument(message.text);
  throw std::runtime_error(message.text);
}

}  // namespace qknorm::ort
