// Threads and scratch memory of one call, behind plain functions: the kernels of the instruction sets call these and
// instantiate nothing of the standard library (see problem.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "qknorm/qk_norm_params.h"

namespace qknorm {

class Runtime {
 public:
  // Calls task(argument, i) for each i in [0, count) and returns when all are done.
  virtual void parallel_for(int64_t count, void (*task)(void* argument, int64_t index), void* argument) = 0;

  // Memory aligned to 64 bytes that lives until the call ends or free_since; NULL (and failed()) where there is none.
  virtual void* allocate(size_t bytes) = 0;
  virtual size_t mark() const = 0;
  virtual void free_since(size_t mark) = 0;

  // A block of at least `bytes` for one worker, reused after give_back. May be called by several threads at once.
  virtual void* borrow(size_t bytes) = 0;
  virtual void give_back(void* block) = 0;

  virtual int64_t threads() const = 0;
  virtual bool failed() const = 0;

 protected:
  ~Runtime() = default;
};

}  // namespace qknorm
