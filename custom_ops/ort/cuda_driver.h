// The CUDA driver, opened with dlopen at first use: no CUDA toolkit to build, no driver needed to load this library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace qknorm::cuda {

using Device = int32_t;
using DevicePointer = uint64_t;
using Context = struct ContextTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;
using Stream = struct StreamTag*;

// There is no driver, no device, or a call to the driver failed; the message says which call and the driver's own
// reason.
class DriverError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline constexpr int32_t kMultiprocessorCount = 16;    // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
inline constexpr int32_t kCapabilityMajor = 75;        // ..._COMPUTE_CAPABILITY_MAJOR
inline constexpr int32_t kCapabilityMinor = 76;        // ..._COMPUTE_CAPABILITY_MINOR
inline constexpr int32_t kSharedMemoryLimit = 97;      // ..._MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
inline constexpr int32_t kMaxDynamicSharedMemory = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
inline constexpr uint32_t kDeviceMemory = 2;           // CU_MEMORYTYPE_DEVICE

// CUDA_MEMCPY2D of the driver.
struct Copy2D {
  size_t source_x, source_y;
  uint32_t source_type;
  const void* source_host;
  DevicePointer source;
  void* source_array;
  size_t source_pitch;
  size_t target_x, target_y;
  uint32_t target_type;
  void* target_host;
  DevicePointer target;
  void* target_array;
  size_t target_pitch;
  size_t width, height;
};

// X(name in the library, member, arguments...); every function returns a CUresult.
#define QKNORM_CUDA_FUNCTIONS(X)                                                                                    \
  X(cuInit, init, uint32_t flags)                                                                                   \
  X(cuGetErrorName, error_name, int32_t result, const char** text)                                                  \
  X(cuGetErrorString, error_text, int32_t result, const char** text)                                                \
  X(cuCtxGetCurrent, current_context, Context* out)                                                                 \
  X(cuCtxPushCurrent_v2, push_context, Context context)                                                             \
  X(cuCtxPopCurrent_v2, pop_context, Context* out)                                                                  \
  X(cuCtxGetDevice, context_device, Device* out)                                                                    \
  X(cuStreamGetCtx, stream_context, Stream stream, Context* out)                                                    \
  X(cuDeviceGetAttribute, device_attribute, int32_t* out, int32_t attribute, Device device)                         \
  X(cuModuleLoadData, load_module, Module* out, const void* image)                                                  \
  X(cuModuleGetFunction, get_function, Function* out, Module module, const char* name)                              \
  X(cuFuncSetAttribute, set_function_attribute, Function function, int32_t attribute, int32_t value)                \
  X(cuLaunchKernel, launch, Function function, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z, uint32_t block_x, \
    uint32_t block_y, uint32_t block_z, uint32_t shared, Stream stream, void** parameters, void** extra)            \
  X(cuMemcpy2DAsync_v2, copy_2d, const Copy2D* copy, Stream stream)

struct Driver {
#define QKNORM_CUDA_MEMBER(symbol, member, ...) int32_t (*member)(__VA_ARGS__);
  QKNORM_CUDA_FUNCTIONS(QKNORM_CUDA_MEMBER)
#undef QKNORM_CUDA_MEMBER

  // Throws DriverError unless `result` is 0; `call` names what was called and for what.
  void check(int32_t result, const std::string& call) const;
};

// The driver, opened and initialised once. Throws DriverError each time it is asked for and cannot be had.
const Driver& driver();

// What a launch needs to know of a device.
struct DeviceFacts {
  int32_t capability;  // 90 for 9.0
  int32_t shared_limit;
  int32_t multiprocessors;
};

// Makes the context of a stream current for its own lifetime, and leaves the thread as it was.
class ContextOfStream {
 public:
  explicit ContextOfStream(Stream stream);
  ~ContextOfStream();
  ContextOfStream(const ContextOfStream&) = delete;
  ContextOfStream& operator=(const ContextOfStream&) = delete;

  Context context() const { return context_; }
  const DeviceFacts& device() const { return facts_; }

 private:
  void push_if_not_current(Stream stream);

  Context context_ = nullptr;
  bool pushed_ = false;
  DeviceFacts facts_{};
};

}  // namespace qknorm::cuda
