// Runtime (threads, scratch memory) as the kernels use it.
#pragma once

#include "kernels/cpu/isa/vector.h"
#include "kernels/cpu/runtime.h"

namespace qknorm {
namespace QKNORM_ISA {

// Calls body(i) for each i in [0, count) on the runtime's threads.
template <class Body>
QKNORM_INLINE void parallel(Runtime& runtime, int64_t count, const Body& body) {
  runtime.parallel_for(
      count, [](void* argument, int64_t index) { (*static_cast<const Body*>(argument))(index); },
      const_cast<Body*>(&body));
}

// `count` values of C for one worker, given back at the end of the scope; data() is NULL where there is no memory.
template <class C>
class Borrowed {
 public:
  Borrowed(Runtime& runtime, int64_t count)
      : runtime_(runtime), data_(static_cast<C*>(runtime.borrow(static_cast<size_t>(count) * sizeof(C)))) {}
  ~Borrowed() {
    if (data_ != nullptr) runtime_.give_back(data_);
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  C* data() const { return data_; }

 private:
  Runtime& runtime_;
  C* data_;
};

template <class C>
QKNORM_INLINE C* allocate(Runtime& runtime, int64_t count) {
  return static_cast<C*>(runtime.allocate(static_cast<size_t>(count) * sizeof(C)));
}

}  // namespace QKNORM_ISA
}  // namespace qknorm
