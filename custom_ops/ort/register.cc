// RegisterCustomOps, which ONNX Runtime calls when the library is registered on session options; and what was built.
#include <mutex>
#include <string>
#include <vector>

#include "ort/cuda_operators.h"
#include "ort/operator_names.h"
#include "ort/operators.h"
#include "qknorm/generated/spec.h"
#include "qknorm/qk_norm_params.h"

namespace qknorm::ort {
namespace {

// One domain for all sessions: it must outlive each of them, so it is never released.
OrtCustomOpDomain* shared_domain(const Api& api) {
  static std::mutex mutex;
  static OrtCustomOpDomain* domain = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (domain == nullptr) {
    OrtCustomOpDomain* made = nullptr;
    check(api, api.CreateCustomOpDomain()(spec::kDomain, &made));
    for (const ort_abi::CustomOp* op : cpu_operators()) check(api, api.CustomOpDomain_Add()(made, op));
    register_cuda(api, made);
    domain = made;
  }
  return domain;
}

OrtStatus* too_old(const ort_abi::ApiBase* base) {
  const OrtApi* oldest = base->get_api(1);
  if (oldest == nullptr) return nullptr;
  const std::string message = std::string("the qknorm-onnx kernels need ONNX Runtime 1.") +
                              std::to_string(ort_abi::kApiVersion) + " or newer; this is ONNX Runtime " +
                              base->get_version_string() +
                              ". Upgrade it (pip install -U onnxruntime), or run the model without the library";
  return Api(oldest).CreateStatus()(ort_abi::kFail, message.c_str());
}

// A session registers a domain once, and ONNX Runtime says only "Domain already set in registry" where it is done
// again. So options remember it here: twice is once, also through copies of the library, and two versions are an error.
constexpr const char* kRegistered = "qknorm.registered_library";

std::string registered_version(const Api& api, const OrtSessionOptions* options) {
  size_t size = 0;
  if (!succeeded(api, api.GetSessionConfigEntry()(options, kRegistered, nullptr, &size))) return "";
  std::vector<char> value(size + 1, '\0');
  check(api, api.GetSessionConfigEntry()(options, kRegistered, value.data(), &size));
  return value.data();
}

void register_once(const Api& api, OrtSessionOptions* options) {
  const std::string known = registered_version(api, options);
  if (known == QKNORM_VERSION) return;
  if (!known.empty()) {
    throw InvalidArgument("these session options have the qknorm-onnx kernels of version '" + known +
                          "' already, and this library is of version '" QKNORM_VERSION
                          "': register one of the two, on options of its own");
  }
  check(api, api.AddCustomOpDomain()(options, shared_domain(api)));
  check(api, api.AddSessionConfigEntry()(options, kRegistered, QKNORM_VERSION));
}

std::string kernel_row(const ort_abi::CustomOp* op, const char* provider, int32_t dtype) {
  return std::string("{\"op\": \"") + op->get_name(op) + "\", \"provider\": \"" + provider +
         "\", \"onnx_element_type\": " + std::to_string(dtype) + "}";
}

}  // namespace

// The registered kernels as the items of a JSON list, each under its operator's own name.
std::string kernel_rows() {
  std::string rows;
  for (const ort_abi::CustomOp* op : cpu_operators()) {
    if (!is_first_name(op->get_name(op))) continue;
    rows += (rows.empty() ? "" : ", ") + kernel_row(op, "cpu", operator_dtype(op));
  }
  for (const ort_abi::CustomOp* op : cuda_operators()) {
    if (is_first_name(op->get_name(op))) rows += ", " + kernel_row(op, "cuda", cuda_operator_dtype(op));
  }
  return rows;
}

}  // namespace qknorm::ort

extern "C" {

QKNORM_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const qknorm::ort_abi::ApiBase* base) {
  using namespace qknorm::ort;
  const OrtApi* table = base->get_api(qknorm::ort_abi::kApiVersion);
  if (table == nullptr) return too_old(base);
  const Api api(table);
  return guarded(api, [&] {
    set_operator_api(api);
    register_once(api, options);
  });
}

// A JSON object: compiler, oldest ONNX Runtime, names per operator, registered kernels.
QKNORM_EXPORT const char* qknorm_build_info(void) {
  static const std::string text = std::string("{\"version\": \"" QKNORM_VERSION "\", \"compiler\": \"") +
#if defined(__clang__)
                                  "clang " __clang_version__
#else
                                  "gcc " __VERSION__
#endif
                                  "\", \"minimum_onnxruntime\": \"1." +
                                  std::to_string(qknorm::ort_abi::kApiVersion) +
                                  "\", \"operator_version\": " + std::to_string(qknorm::spec::kVersion) +
                                  ", \"names_per_operator\": " + std::to_string(qknorm::spec::kNamesPerOperator) +
                                  ", \"kernels\": [" + qknorm::ort::kernel_rows() + "]}";
  return text.c_str();
}

}  // extern "C"
