#include "ort/cuda_driver.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

namespace qknorm::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

template <class F>
void find(void* library, const char* symbol, F* out) {
  void* found = dlsym(library, symbol);
  if (found == nullptr) {
    throw DriverError(std::string("the CUDA driver (") + kLibrary + ") lacks " + symbol +
                      "; the kernels need a driver of CUDA 12 or newer");
  }
  *out = reinterpret_cast<F>(found);
}

Driver open_driver() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw DriverError(std::string("there is no CUDA driver: ") + kLibrary +
                      " cannot be opened; install the NVIDIA driver, or run on the CPU provider");
  }
  Driver out{};
#define QKNORM_CUDA_FIND(symbol, member, ...) find(library, #symbol, &out.member);
  QKNORM_CUDA_FUNCTIONS(QKNORM_CUDA_FIND)
#undef QKNORM_CUDA_FIND
  out.check(out.init(0), "cuInit");
  return out;
}

DeviceFacts read_facts(const Driver& cuda) {
  Device device = 0;
  cuda.check(cuda.context_device(&device), "cuCtxGetDevice");
  const auto attribute = [&](int32_t which) {
    int32_t value = 0;
    cuda.check(cuda.device_attribute(&value, which, device), "cuDeviceGetAttribute " + std::to_string(which));
    return value;
  };
  return {10 * attribute(kCapabilityMajor) + attribute(kCapabilityMinor), attribute(kSharedMemoryLimit),
          attribute(kMultiprocessorCount)};
}

DeviceFacts facts_of(const Driver& cuda, Context context) {
  static std::mutex mutex;
  static std::map<Context, DeviceFacts> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(context);
  if (found != known.end()) return found->second;
  return known.emplace(context, read_facts(cuda)).first->second;
}

}  // namespace

void Driver::check(int32_t result, const std::string& call) const {
  if (result == 0) return;
  const char* name = nullptr;
  const char* text = nullptr;
  const bool named = error_name != nullptr && error_name(result, &name) == 0 && name != nullptr;
  const bool told = error_text != nullptr && error_text(result, &text) == 0 && text != nullptr;
  throw DriverError(call + " failed: " + (named ? name : "CUDA error " + std::to_string(result)) +
                    (told ? std::string(", ") + text : ""));
}

const Driver& driver() {
  static const Driver opened = open_driver();  // a constructor that throws is tried again the next time
  return opened;
}

ContextOfStream::ContextOfStream(Stream stream) {
  push_if_not_current(stream);
  try {
    facts_ = facts_of(driver(), context_);
  } catch (const DriverError&) {
    Context old = nullptr;
    if (pushed_) driver().pop_context(&old);
    throw;
  }
}

void ContextOfStream::push_if_not_current(Stream stream) {
  const Driver& cuda = driver();
  Context current = nullptr;
  cuda.check(cuda.current_context(&current), "cuCtxGetCurrent");
  if (stream == nullptr && current == nullptr) {
    throw DriverError("no CUDA context is current on this thread, and no stream says which one to use");
  }
  context_ = current;
  if (stream != nullptr) cuda.check(cuda.stream_context(stream, &context_), "cuStreamGetCtx");
  if (context_ == current) return;
  cuda.check(cuda.push_context(context_), "cuCtxPushCurrent");
  pushed_ = true;
}

ContextOfStream::~ContextOfStream() {
  Context old = nullptr;
  if (pushed_) driver().pop_context(&old);
}

}  // namespace qknorm::cuda
