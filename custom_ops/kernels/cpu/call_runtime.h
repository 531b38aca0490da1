// The Runtime of one call: an executor's threads and memory, released when the call ends.
#pragma once

#include <atomic>
#include <mutex>
#include <vector>

#include "kernels/cpu/runtime.h"

namespace qknorm {

class CallRuntime final : public Runtime {
 public:
  // `executor` may be NULL: one thread, malloc.
  explicit CallRuntime(const qknorm_executor* executor);
  ~CallRuntime();
  CallRuntime(const CallRuntime&) = delete;
  CallRuntime& operator=(const CallRuntime&) = delete;

  void parallel_for(int64_t count, void (*task)(void* argument, int64_t index), void* argument) override;
  void* allocate(size_t bytes) override;
  size_t mark() const override;
  void free_since(size_t mark) override;
  void* borrow(size_t bytes) override;
  void give_back(void* block) override;
  int64_t threads() const override;
  bool failed() const override;

 private:
  struct Block {
    void* memory;   // as the allocator gave it
    void* aligned;  // what the kernels see
    size_t bytes;
    bool in_use;
  };

  Block make_block(size_t bytes);
  void release(const Block& block);

  const qknorm_executor* executor_;
  std::atomic<bool> failed_{false};
  std::vector<Block> call_blocks_;
  std::mutex worker_mutex_;
  std::vector<Block> worker_blocks_;
};

}  // namespace qknorm
