// Compares qknorm/ort_abi.h with ONNX Runtime's official header at compile time, where CMake was given one.
#if defined(QKNORM_CHECK_ORT_ABI)

#include <onnxruntime_c_api.h>

#include <type_traits>

#include "qknorm/ort_abi.h"

// The official functions carry attributes (a result that must be used) that a type does not.
#pragma GCC diagnostic ignored "-Wignored-attributes"

namespace qknorm::ort_abi {
namespace {

// Our names for types that the official header defines, and int32_t for its enumerations.
template <class T, class = void>
struct Ours {
  using Type = T;
};
template <class T>
struct Ours<T, std::enable_if_t<std::is_enum_v<T>>> {
  using Type = std::enable_if_t<sizeof(T) == sizeof(int32_t), int32_t>;
};
template <>
struct Ours<OrtCustomOp> {
  using Type = CustomOp;
};
template <>
struct Ours<OrtAllocator> {
  using Type = Allocator;
};
template <class T>
struct Ours<const T> {
  using Type = const typename Ours<T>::Type;
};
template <class T>
struct Ours<T*, void> {
  using Type = typename Ours<T>::Type*;
};
template <class R, class... A>
struct Ours<R(A...) noexcept, void> {
  using Type = typename Ours<R>::Type(typename Ours<A>::Type...);
};
template <class R, class... A>
struct Ours<R(A...), void> {
  using Type = typename Ours<R>::Type(typename Ours<A>::Type...);
};

template <class Official, class Own>
constexpr bool kSame = std::is_same_v<typename Ours<Official>::Type, Own>;

#define QKNORM_CHECK(slot, name, result, ...)                                      \
  static_assert(offsetof(OrtApi, name) == slot * sizeof(void*), "slot of " #name); \
  static_assert(kSame<decltype(OrtApi::name), Api::name##Function>, "signature of " #name);
QKNORM_ORT_FUNCTIONS(QKNORM_CHECK)
#undef QKNORM_CHECK

#define QKNORM_FIELD(official, own)                                                             \
  static_assert(offsetof(OrtCustomOp, official) == offsetof(CustomOp, own), "offset of " #own); \
  static_assert(kSame<decltype(OrtCustomOp::official), decltype(CustomOp::own)>, "type of " #own);
QKNORM_FIELD(version, version)
QKNORM_FIELD(CreateKernel, create_kernel)
QKNORM_FIELD(GetName, get_name)
QKNORM_FIELD(GetExecutionProviderType, get_execution_provider)
QKNORM_FIELD(GetInputType, get_input_type)
QKNORM_FIELD(GetInputTypeCount, get_input_count)
QKNORM_FIELD(GetOutputType, get_output_type)
QKNORM_FIELD(GetOutputTypeCount, get_output_count)
QKNORM_FIELD(KernelCompute, compute)
QKNORM_FIELD(KernelDestroy, destroy)
QKNORM_FIELD(GetInputCharacteristic, get_input_characteristic)
QKNORM_FIELD(GetOutputCharacteristic, get_output_characteristic)
QKNORM_FIELD(GetInputMemoryType, get_input_memory_type)
QKNORM_FIELD(GetVariadicInputMinArity, get_variadic_input_min_arity)
QKNORM_FIELD(GetVariadicInputHomogeneity, get_variadic_input_homogeneity)
QKNORM_FIELD(GetVariadicOutputMinArity, get_variadic_output_min_arity)
QKNORM_FIELD(GetVariadicOutputHomogeneity, get_variadic_output_homogeneity)
QKNORM_FIELD(CreateKernelV2, create_kernel_v2)
QKNORM_FIELD(KernelComputeV2, compute_v2)
QKNORM_FIELD(InferOutputShapeFn, infer_output_shape)
QKNORM_FIELD(GetStartVersion, get_start_version)
QKNORM_FIELD(GetEndVersion, get_end_version)
QKNORM_FIELD(GetMayInplace, get_may_inplace)
QKNORM_FIELD(ReleaseMayInplace, release_may_inplace)
QKNORM_FIELD(GetAliasMap, get_alias_map)
QKNORM_FIELD(ReleaseAliasMap, release_alias_map)
#undef QKNORM_FIELD

static_assert(sizeof(OrtCustomOp) == sizeof(CustomOp));
static_assert(offsetof(OrtAllocator, Alloc) == offsetof(Allocator, alloc));
static_assert(offsetof(OrtAllocator, Free) == offsetof(Allocator, free));
static_assert(offsetof(OrtAllocator, Info) == offsetof(Allocator, info));
static_assert(offsetof(OrtApiBase, GetApi) == offsetof(ApiBase, get_api));
static_assert(offsetof(OrtApiBase, GetVersionString) == offsetof(ApiBase, get_version_string));
static_assert(ORT_FAIL == kFail && ORT_INVALID_ARGUMENT == kInvalidArgument);
static_assert(ORT_OP_ATTR_INT == kAttributeInt && OrtMemTypeDefault == kMemoryDefault);
static_assert(INPUT_OUTPUT_REQUIRED == kRequired && INPUT_OUTPUT_OPTIONAL == kOptional);
static_assert(ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED == kAnyType);

}  // namespace
}  // namespace qknorm::ort_abi

#endif  // QKNORM_CHECK_ORT_ABI
