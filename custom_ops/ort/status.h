// OrtStatus and C++: inside the library a failure is an exception, at the C ABI it is a status again.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "qknorm/ort_abi.h"

namespace qknorm::ort {

using ort_abi::Api;

// What the caller gave is wrong: ORT_INVALID_ARGUMENT. Any other exception becomes ORT_FAIL.
class InvalidArgument : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws what a status says, and releases it.
inline void check(const Api& api, OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = api.GetErrorMessage()(status);
  api.ReleaseStatus()(status);
  throw std::runtime_error(message);
}

// Whether a call succeeded; a failure is released and forgotten.
inline bool succeeded(const Api& api, OrtStatus* status) {
  if (status == nullptr) return true;
  api.ReleaseStatus()(status);
  return false;
}

template <class Body>
OrtStatus* guarded(const Api& api, const Body& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const InvalidArgument& error) {
    return api.CreateStatus()(ort_abi::kInvalidArgument, error.what());
  } catch (const std::exception& error) {
    return api.CreateStatus()(ort_abi::kFail, error.what());
  }
}

}  // namespace qknorm::ort
