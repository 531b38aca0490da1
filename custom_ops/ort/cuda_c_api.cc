// The plain C door of the CUDA launcher: no ONNX Runtime, for tests and benchmarks through ctypes.
#include <cstring>
#include <exception>
#include <string>

#include "ort/cuda_attention.h"

namespace qknorm::cuda {
namespace {

template <class Body>
int32_t told(qknorm_message* message, const Body& body) noexcept {
  std::string text;
  int32_t status = QKNORM_INVALID_ARGUMENT;
  try {
    body();
    return QKNORM_OK;
  } catch (const std::bad_alloc&) {
    text = "out of memory";
    status = QKNORM_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    text = error.what();
  }
  if (message != nullptr) {
    std::strncpy(message->text, text.c_str(), sizeof(message->text) - 1);
    message->text[sizeof(message->text) - 1] = '\0';
  }
  return status;
}

Target target_of(void* stream, const qknorm_executor* executor) {
  if (executor == nullptr) throw std::invalid_argument("an executor is needed: its memory is the workspace");
  return {&shared_pack(), static_cast<Stream>(stream), {executor->context, executor->allocate, executor->release}};
}

}  // namespace
}  // namespace qknorm::cuda

extern "C" {

// Takes the kernel pack from this folder instead of the one beside the library; an empty text goes back to that.
QKNORM_EXPORT void qknorm_cuda_use_kernel_pack(const char* folder) { qknorm::cuda::use_pack(folder); }

// Whether a driver and a readable kernel pack are there; the message says what is missing.
QKNORM_EXPORT int32_t qknorm_cuda_check(qknorm_message* message) {
  return qknorm::cuda::told(message, [] {
    qknorm::cuda::driver();
    qknorm::cuda::shared_pack();
  });
}

// As qknorm_cpu_attention with device pointers: enqueues on `stream`. Of `executor` only its memory is used.
QKNORM_EXPORT int32_t qknorm_cuda_attention(const qknorm::spec::AttentionAttributes* attributes,
                                            const qknorm_tensor* inputs, void* y, void* present_key,
                                            void* present_value, void* stream, const qknorm_executor* executor,
                                            qknorm_message* message) {
  using namespace qknorm::cuda;
  return told(message,
              [&] { run_attention(*attributes, inputs, y, present_key, present_value, target_of(stream, executor)); });
}

QKNORM_EXPORT int32_t qknorm_cuda_rotary(const qknorm::spec::RotaryAttributes* attributes, const qknorm_tensor* inputs,
                                         void* y, void* stream, const qknorm_executor* executor,
                                         qknorm_message* message) {
  using namespace qknorm::cuda;
  return told(message, [&] { run_rotary(*attributes, inputs, y, target_of(stream, executor)); });
}

// The reason why no CUDA kernel serves these attributes with type T `dtype` of float (1), float16 (10) ...; OK where
// one does.
QKNORM_EXPORT int32_t qknorm_cuda_check_attention(const qknorm::spec::AttentionAttributes* attributes, int64_t dtype,
                                                  qknorm_message* message) {
  using namespace qknorm::cuda;
  return told(message, [&] {
    const std::string reason = refusal(*attributes, dtype);
    if (!reason.empty()) throw std::invalid_argument(reason);
  });
}

}  // extern "C"
