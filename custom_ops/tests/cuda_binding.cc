// The CUDA operators alone, registered for the CPU provider: the stand-in driver then takes host memory for device
// memory, and the binding runs inside a real ONNX Runtime. Built with QKNORM_CUDA_PROVIDER="CPUExecutionProvider".
#include <string>

#include "ort/cuda_operators.h"
#include "ort/cuda_pack.h"
#include "ort/operators.h"
#include "qknorm/generated/spec.h"
#include "qknorm/qk_norm_params.h"

extern "C" {

QKNORM_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const qknorm::ort_abi::ApiBase* base) {
  using namespace qknorm::ort;
  const Api api(base->get_api(qknorm::ort_abi::kApiVersion));
  return guarded(api, [&] {
    set_operator_api(api);
    static OrtCustomOpDomain* domain = nullptr;  // it must outlive every session
    if (domain == nullptr) {
      check(api, api.CreateCustomOpDomain()(qknorm::spec::kDomain, &domain));
      for (const qknorm::ort_abi::CustomOp* op : cuda_operators()) check(api, api.CustomOpDomain_Add()(domain, op));
    }
    check(api, api.AddCustomOpDomain()(options, domain));
  });
}

}  // extern "C"
