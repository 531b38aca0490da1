// A stand-in for libcuda.so.1 in tests on machines without a GPU: it checks what a driver would check, hands every
// image, launch and copy to the test, and fails on request. Built as a library of that SONAME and loaded before the
// launcher asks for it.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#define STAND_IN extern "C" __attribute__((visibility("default")))

namespace {

constexpr int32_t kInvalidValue = 1;
constexpr int32_t kInvalidContext = 201;
constexpr uint32_t kSharedWithoutAsking = 48 * 1024;

struct FunctionRecord {
  const void* image;
  uint32_t shared_limit;
};

// What the test is told: a plain struct, so that ctypes can read it.
struct Launch {
  const char* entry;
  const void* image;
  uint32_t grid[3];
  uint32_t block;
  uint32_t shared;
  void* stream;
  const void* arguments;
  size_t arguments_size;
};

struct Copy2D {
  size_t source_x, source_y;
  uint32_t source_type;
  const void* source_host;
  uint64_t source;
  void* source_array;
  size_t source_pitch;
  size_t target_x, target_y;
  uint32_t target_type;
  void* target_host;
  uint64_t target;
  void* target_array;
  size_t target_pitch;
  size_t width, height;
};

struct Settings {
  int32_t capability = 90;
  int32_t shared_limit = 232448;
  int32_t multiprocessors = 132;
  void (*on_launch)(const Launch*) = nullptr;
  std::map<std::string, int32_t> failures;
  int32_t version = 12090;  // as cuDriverGetVersion says it: 12.9
  int32_t devices = 1;
};

Settings settings;
std::vector<void*> contexts;  // of this thread; tests use one
std::map<void*, void*> stream_contexts;
std::map<void*, FunctionRecord> functions;
std::map<void*, std::string> entries;
std::set<const void*> images;
uintptr_t next_handle = 0x1000;

void* handle() { return reinterpret_cast<void*>(next_handle += 16); }

int32_t failure(const char* call) {
  const auto found = settings.failures.find(call);
  return found == settings.failures.end() ? 0 : found->second;
}

}  // namespace

#define FAIL_ON_REQUEST(call)             \
  do {                                    \
    const int32_t wanted = failure(call); \
    if (wanted != 0) return wanted;       \
  } while (false)

// --- what tests call ---

STAND_IN void stand_in_reset(int32_t capability, int32_t shared_limit, int32_t multiprocessors,
                             void (*on_launch)(const Launch*)) {
  settings = Settings{};
  settings.capability = capability;
  settings.shared_limit = shared_limit;
  settings.multiprocessors = multiprocessors;
  settings.on_launch = on_launch;
  contexts.clear();
  stream_contexts.clear();
}

STAND_IN void stand_in_fail(const char* call, int32_t result) { settings.failures[call] = result; }

STAND_IN void stand_in_set_driver(int32_t version, int32_t devices) {
  settings.version = version;
  settings.devices = devices;
}

STAND_IN void* stand_in_make_context() { return handle(); }

STAND_IN void stand_in_set_current(void* context) { contexts.assign(context == nullptr ? 0 : 1, context); }

STAND_IN void* stand_in_make_stream(void* context) {
  void* stream = handle();
  stream_contexts[stream] = context;
  return stream;
}

STAND_IN size_t stand_in_context_depth() { return contexts.size(); }

// --- the driver ---

STAND_IN int32_t cuInit(uint32_t) { return failure("cuInit"); }

STAND_IN int32_t cuGetErrorName(int32_t result, const char** text) {
  static std::string name;
  name = "CUDA_ERROR_" + std::to_string(result);
  *text = name.c_str();
  return 0;
}

STAND_IN int32_t cuGetErrorString(int32_t, const char** text) {
  *text = "as the test asked for";
  return 0;
}

STAND_IN int32_t cuCtxGetCurrent(void** out) {
  FAIL_ON_REQUEST("cuCtxGetCurrent");
  *out = contexts.empty() ? nullptr : contexts.back();
  return 0;
}

STAND_IN int32_t cuCtxPushCurrent_v2(void* context) {
  FAIL_ON_REQUEST("cuCtxPushCurrent");
  contexts.push_back(context);
  return 0;
}

STAND_IN int32_t cuCtxPopCurrent_v2(void** out) {
  if (contexts.empty()) return kInvalidContext;
  *out = contexts.back();
  contexts.pop_back();
  return 0;
}

STAND_IN int32_t cuCtxGetDevice(int32_t* out) {
  FAIL_ON_REQUEST("cuCtxGetDevice");
  *out = 0;
  return contexts.empty() ? kInvalidContext : 0;
}

STAND_IN int32_t cuStreamGetCtx(void* stream, void** out) {
  FAIL_ON_REQUEST("cuStreamGetCtx");
  const auto found = stream_contexts.find(stream);
  if (found == stream_contexts.end()) return kInvalidValue;
  *out = found->second;
  return 0;
}

STAND_IN int32_t cuDeviceGetAttribute(int32_t* out, int32_t attribute, int32_t) {
  FAIL_ON_REQUEST("cuDeviceGetAttribute");
  const std::map<int32_t, int32_t> known = {{16, settings.multiprocessors},
                                            {75, settings.capability / 10},
                                            {76, settings.capability % 10},
                                            {97, settings.shared_limit}};
  if (known.count(attribute) == 0) return kInvalidValue;
  *out = known.at(attribute);
  return 0;
}

STAND_IN int32_t cuDriverGetVersion(int32_t* out) {
  FAIL_ON_REQUEST("cuDriverGetVersion");
  *out = settings.version;
  return 0;
}

STAND_IN int32_t cuDeviceGetCount(int32_t* out) {
  FAIL_ON_REQUEST("cuDeviceGetCount");
  *out = settings.devices;
  return 0;
}

STAND_IN int32_t cuDeviceGet(int32_t* out, int32_t ordinal) {
  *out = ordinal;
  return ordinal < settings.devices ? 0 : kInvalidValue;
}

STAND_IN int32_t cuDeviceGetName(char* out, int32_t size, int32_t) {
  std::strncpy(out, "Stand-in", static_cast<size_t>(size));
  return 0;
}

STAND_IN int32_t cuModuleLoadData(void** out, const void* image) {
  FAIL_ON_REQUEST("cuModuleLoadData");
  if (contexts.empty()) return kInvalidContext;
  // The caller's memory may go: the tests' images are texts, and are kept.
  const char* kept = strdup(static_cast<const char*>(image));
  images.insert(kept);
  *out = const_cast<char*>(kept);
  return 0;
}

STAND_IN int32_t cuModuleGetFunction(void** out, void* module, const char* name) {
  FAIL_ON_REQUEST("cuModuleGetFunction");
  if (images.count(module) == 0) return kInvalidValue;
  *out = handle();
  functions[*out] = {module, kSharedWithoutAsking};
  entries[*out] = name;
  return 0;
}

STAND_IN int32_t cuFuncSetAttribute(void* function, int32_t attribute, int32_t value) {
  FAIL_ON_REQUEST("cuFuncSetAttribute");
  if (attribute != 8 || value > settings.shared_limit || functions.count(function) == 0) return kInvalidValue;
  functions[function].shared_limit = static_cast<uint32_t>(value);
  return 0;
}

STAND_IN int32_t cuLaunchKernel(void* function, uint32_t x, uint32_t y, uint32_t z, uint32_t block_x, uint32_t block_y,
                                uint32_t block_z, uint32_t shared, void* stream, void** parameters, void** extra) {
  FAIL_ON_REQUEST("cuLaunchKernel");
  if (contexts.empty()) return kInvalidContext;
  const bool known = functions.count(function) != 0 && parameters == nullptr && extra != nullptr;
  if (!known || x == 0 || y == 0 || z == 0 || y > 65535 || z > 65535 || block_y != 1 || block_z != 1)
    return kInvalidValue;
  if (shared > functions[function].shared_limit) return kInvalidValue;
  // CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END
  if (extra[0] != reinterpret_cast<void*>(1) || extra[2] != reinterpret_cast<void*>(2) || extra[4] != nullptr)
    return kInvalidValue;
  const Launch launch = {
      entries[function].c_str(),      functions[function].image, {x, y, z}, block_x, shared, stream, extra[1],
      *static_cast<size_t*>(extra[3])};
  if (settings.on_launch != nullptr) settings.on_launch(&launch);
  return 0;
}

// Device memory is host memory here: the copy is made at once, as the launches are.
STAND_IN int32_t cuMemcpy2DAsync_v2(const Copy2D* copy, void*) {
  FAIL_ON_REQUEST("cuMemcpy2DAsync");
  if (copy->source_type != 2 || copy->target_type != 2) return kInvalidValue;
  if (copy->width > copy->source_pitch || copy->width > copy->target_pitch) return kInvalidValue;
  for (size_t row = 0; row < copy->height; ++row) {
    std::memcpy(reinterpret_cast<char*>(copy->target) + row * copy->target_pitch,
                reinterpret_cast<const char*>(copy->source) + row * copy->source_pitch, copy->width);
  }
  return 0;
}
