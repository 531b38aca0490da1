// RegisterCustomOps, which ONNX Runtime calls when the library is registered on session options; and what was built.
#include <map>
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

std::vector<const ort_abi::CustomOp*> all_operators() {
  std::vector<const ort_abi::CustomOp*> all = cpu_operators();
  const std::vector<const ort_abi::CustomOp*> cuda = cuda_operators();
  all.insert(all.end(), cuda.begin(), cuda.end());
  return all;
}

// The operators under their first `names` names. One domain for all sessions: it must outlive each of them, so it is
// never released.
OrtCustomOpDomain* shared_domain(const Api& api, int names) {
  static std::mutex mutex;
  static std::map<int, OrtCustomOpDomain*> domains;
  const std::lock_guard<std::mutex> lock(mutex);
  OrtCustomOpDomain*& domain = domains[names];
  if (domain == nullptr) {
    OrtCustomOpDomain* made = nullptr;
    check(api, api.CreateCustomOpDomain()(spec::kDomain, &made));
    for (const ort_abi::CustomOp* op : all_operators()) {
      if (number_of(op->get_name(op)) <= names) check(api, api.CustomOpDomain_Add()(made, op));
    }
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

// How many names of each operator a session is to know. ONNX Runtime makes a schema and kernels of each one for every
// session, 20 ms for all of them; who makes the session knows the model, and how many its nodes have.
constexpr const char* kNames = "qknorm.names_per_operator";

// Empty where the options have no such entry.
std::string config_entry(const Api& api, const OrtSessionOptions* options, const char* key) {
  size_t size = 0;
  if (!succeeded(api, api.GetSessionConfigEntry()(options, key, nullptr, &size))) return "";
  std::vector<char> value(size + 1, '\0');
  check(api, api.GetSessionConfigEntry()(options, key, value.data(), &size));
  return value.data();
}

int wanted_names(const Api& api, const OrtSessionOptions* options) {
  const std::string text = config_entry(api, options, kNames);
  if (text.empty()) return spec::kNamesPerOperator;
  for (int names = 1; names <= spec::kNamesPerOperator; ++names) {
    if (text == std::to_string(names)) return names;
  }
  throw InvalidArgument(std::string(kNames) + " of the session options is '" + text + "'; it is a number from 1 to " +
                        std::to_string(spec::kNamesPerOperator));
}

void register_once(const Api& api, OrtSessionOptions* options) {
  const std::string known = config_entry(api, options, kRegistered);
  if (known == QKNORM_VERSION) return;
  if (!known.empty()) {
    throw InvalidArgument("these session options have the qknorm-onnx kernels of version '" + known +
                          "' already, and this library is of version '" QKNORM_VERSION
                          "': register one of the two, on options of its own");
  }
  check(api, api.AddCustomOpDomain()(options, shared_domain(api, wanted_names(api, options))));
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
    if (number_of(op->get_name(op)) != 1) continue;
    rows += (rows.empty() ? "" : ", ") + kernel_row(op, "cpu", operator_dtype(op));
  }
  for (const ort_abi::CustomOp* op : cuda_operators()) {
    if (number_of(op->get_name(op)) == 1) rows += ", " + kernel_row(op, "cuda", cuda_operator_dtype(op));
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
