// The part of ONNX Runtime's C ABI that this library uses, so that it builds without ONNX Runtime's headers.
//
// OrtApi is a table of function pointers to which versions only append, so a function is its slot number and its
// signature; OrtCustomOp is a struct that the caller fills. `ort/abi_check.cc` compares all of it with the official
// header where one is given (CMake: ONNXRUNTIME_INCLUDE_DIR).
#pragma once

#include <cstddef>
#include <cstdint>

struct OrtApi;
struct OrtCustomOpDomain;
struct OrtKernelContext;
struct OrtKernelInfo;
struct OrtMemoryInfo;
struct OrtOpAttr;
struct OrtSessionOptions;
struct OrtShapeInferContext;
struct OrtStatus;
struct OrtTensorTypeAndShapeInfo;
struct OrtValue;

namespace qknorm::ort_abi {

// The oldest ONNX Runtime that works is 1.24: older ones crash on an omitted middle input. All slots below exist in it.
inline constexpr uint32_t kApiVersion = 24;

inline constexpr int32_t kFail = 1;             // OrtErrorCode ORT_FAIL
inline constexpr int32_t kInvalidArgument = 2;  // OrtErrorCode ORT_INVALID_ARGUMENT
inline constexpr int32_t kAttributeInt = 1;     // OrtOpAttrType ORT_OP_ATTR_INT
inline constexpr int32_t kAnyType = 0;          // ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED
inline constexpr int32_t kRequired = 0;         // OrtCustomOpInputOutputCharacteristic INPUT_OUTPUT_REQUIRED
inline constexpr int32_t kOptional = 1;         // ... INPUT_OUTPUT_OPTIONAL
inline constexpr int32_t kMemoryDefault = 0;    // OrtMemType OrtMemTypeDefault

struct ApiBase {
  const OrtApi* (*get_api)(uint32_t version);
  const char* (*get_version_string)();
};

struct Allocator {
  uint32_t version;
  void* (*alloc)(Allocator* self, size_t size);
  void (*free)(Allocator* self, void* memory);
  const OrtMemoryInfo* (*info)(const Allocator* self);
};

// Field by field the official OrtCustomOp.
struct CustomOp {
  uint32_t version;
  void* (*create_kernel)(const CustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*get_name)(const CustomOp*);
  const char* (*get_execution_provider)(const CustomOp*);
  int32_t (*get_input_type)(const CustomOp*, size_t index);
  size_t (*get_input_count)(const CustomOp*);
  int32_t (*get_output_type)(const CustomOp*, size_t index);
  size_t (*get_output_count)(const CustomOp*);
  void (*compute)(void* kernel, OrtKernelContext*);
  void (*destroy)(void* kernel);
  int32_t (*get_input_characteristic)(const CustomOp*, size_t index);
  int32_t (*get_output_characteristic)(const CustomOp*, size_t index);
  int32_t (*get_input_memory_type)(const CustomOp*, size_t index);
  int32_t (*get_variadic_input_min_arity)(const CustomOp*);
  int32_t (*get_variadic_input_homogeneity)(const CustomOp*);
  int32_t (*get_variadic_output_min_arity)(const CustomOp*);
  int32_t (*get_variadic_output_homogeneity)(const CustomOp*);
  OrtStatus* (*create_kernel_v2)(const CustomOp*, const OrtApi*, const OrtKernelInfo*, void** kernel);
  OrtStatus* (*compute_v2)(void* kernel, OrtKernelContext*);
  OrtStatus* (*infer_output_shape)(const CustomOp*, OrtShapeInferContext*);
  int32_t (*get_start_version)(const CustomOp*);
  int32_t (*get_end_version)(const CustomOp*);
  size_t (*get_may_inplace)(int** inputs, int** outputs);
  void (*release_may_inplace)(int* inputs, int* outputs);
  size_t (*get_alias_map)(int** inputs, int** outputs);
  void (*release_alias_map)(int* inputs, int* outputs);
};

// X(slot, official name, result, arguments...)
#define QKNORM_ORT_FUNCTIONS(X)                                                                                     \
  X(0, CreateStatus, OrtStatus*, int32_t code, const char* message)                                                 \
  X(2, GetErrorMessage, const char*, const OrtStatus* status)                                                       \
  X(26, CreateCustomOpDomain, OrtStatus*, const char* domain, OrtCustomOpDomain** out)                              \
  X(27, CustomOpDomain_Add, OrtStatus*, OrtCustomOpDomain* domain, const ::qknorm::ort_abi::CustomOp* op)           \
  X(28, AddCustomOpDomain, OrtStatus*, OrtSessionOptions* options, OrtCustomOpDomain* domain)                       \
  X(51, GetTensorMutableData, OrtStatus*, OrtValue* value, void** out)                                              \
  X(57, CreateTensorTypeAndShapeInfo, OrtStatus*, OrtTensorTypeAndShapeInfo** out)                                  \
  X(58, SetTensorElementType, OrtStatus*, OrtTensorTypeAndShapeInfo* info, int32_t type)                            \
  X(59, SetDimensions, OrtStatus*, OrtTensorTypeAndShapeInfo* info, const int64_t* dims, size_t count)              \
  X(60, GetTensorElementType, OrtStatus*, const OrtTensorTypeAndShapeInfo* info, int32_t* out)                      \
  X(61, GetDimensionsCount, OrtStatus*, const OrtTensorTypeAndShapeInfo* info, size_t* out)                         \
  X(62, GetDimensions, OrtStatus*, const OrtTensorTypeAndShapeInfo* info, int64_t* dims, size_t count)              \
  X(63, GetSymbolicDimensions, OrtStatus*, const OrtTensorTypeAndShapeInfo* info, const char** names, size_t count) \
  X(85, KernelInfoGetAttribute_float, OrtStatus*, const OrtKernelInfo* info, const char* name, float* out)          \
  X(86, KernelInfoGetAttribute_int64, OrtStatus*, const OrtKernelInfo* info, const char* name, int64_t* out)        \
  X(87, KernelInfoGetAttribute_string, OrtStatus*, const OrtKernelInfo* info, const char* name, char* out,          \
    size_t* size)                                                                                                   \
  X(88, KernelContext_GetInputCount, OrtStatus*, const OrtKernelContext* context, size_t* out)                      \
  X(89, KernelContext_GetOutputCount, OrtStatus*, const OrtKernelContext* context, size_t* out)                     \
  X(90, KernelContext_GetInput, OrtStatus*, const OrtKernelContext* context, size_t index, const OrtValue** out)    \
  X(91, KernelContext_GetOutput, OrtStatus*, OrtKernelContext* context, size_t index, const int64_t* dims,          \
    size_t count, OrtValue** out)                                                                                   \
  X(93, ReleaseStatus, void, OrtStatus* status)                                                                     \
  X(99, ReleaseTensorTypeAndShapeInfo, void, OrtTensorTypeAndShapeInfo* info)                                       \
  X(130, AddSessionConfigEntry, OrtStatus*, OrtSessionOptions* options, const char* key, const char* value)         \
  X(132, ReleaseAllocator, void, ::qknorm::ort_abi::Allocator* allocator)                                           \
  X(162, KernelInfoGetAttributeArray_float, OrtStatus*, const OrtKernelInfo* info, const char* name, float* out,    \
    size_t* size)                                                                                                   \
  X(163, KernelInfoGetAttributeArray_int64, OrtStatus*, const OrtKernelInfo* info, const char* name, int64_t* out,  \
    size_t* size)                                                                                                   \
  X(193, KernelContext_GetGPUComputeStream, OrtStatus*, const OrtKernelContext* context, void** out)                \
  X(238, GetSessionConfigEntry, OrtStatus*, const OrtSessionOptions* options, const char* key, char* out,           \
    size_t* size)                                                                                                   \
  X(244, KernelInfo_GetNodeName, OrtStatus*, const OrtKernelInfo* info, char* out, size_t* size)                    \
  X(267, ShapeInferContext_GetInputCount, OrtStatus*, const OrtShapeInferContext* context, size_t* out)             \
  X(268, ShapeInferContext_GetInputTypeShape, OrtStatus*, const OrtShapeInferContext* context, size_t index,        \
    OrtTensorTypeAndShapeInfo** out)                                                                                \
  X(269, ShapeInferContext_GetAttribute, OrtStatus*, const OrtShapeInferContext* context, const char* name,         \
    const OrtOpAttr** out)                                                                                          \
  X(270, ShapeInferContext_SetOutputTypeShape, OrtStatus*, const OrtShapeInferContext* context, size_t index,       \
    const OrtTensorTypeAndShapeInfo* info)                                                                          \
  X(271, SetSymbolicDimensions, OrtStatus*, OrtTensorTypeAndShapeInfo* info, const char** names, size_t count)      \
  X(272, ReadOpAttr, OrtStatus*, const OrtOpAttr* attribute, int32_t type, void* data, size_t size, size_t* out)    \
  X(274, KernelContext_ParallelFor, OrtStatus*, const OrtKernelContext* context, void (*task)(void*, size_t),       \
    size_t total, size_t num_batch, void* argument)                                                                 \
  X(278, KernelInfoGetAllocator, OrtStatus*, const OrtKernelInfo* info, int32_t memory_type,                        \
    ::qknorm::ort_abi::Allocator** out)                                                                             \
  X(414, GetTensorElementTypeAndShapeDataReference, OrtStatus*, const OrtValue* value, int32_t* type,               \
    const int64_t** dims, size_t* rank)

// The functions, taken out of ONNX Runtime's table.
class Api {
 public:
  explicit Api(const OrtApi* table) : slots_(reinterpret_cast<void (*const*)()>(table)) {}

#define QKNORM_ORT_METHOD(slot, name, result, ...) \
  using name##Function = result (*)(__VA_ARGS__);  \
  name##Function name() const { return reinterpret_cast<name##Function>(slots_[slot]); }
  QKNORM_ORT_FUNCTIONS(QKNORM_ORT_METHOD)
#undef QKNORM_ORT_METHOD

 private:
  void (*const* slots_)();
};

}  // namespace qknorm::ort_abi
