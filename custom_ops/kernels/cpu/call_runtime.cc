#include "kernels/cpu/call_runtime.h"

#include <cstdlib>

namespace qknorm {
namespace {

constexpr size_t kAlignment = 64;

void* align_up(void* memory) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  return reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment);
}

}  // namespace

CallRuntime::CallRuntime(const qknorm_executor* executor) : executor_(executor) {}

CallRuntime::~CallRuntime() {
  for (const Block& block : call_blocks_) release(block);
  for (const Block& block : worker_blocks_) release(block);
}

void CallRuntime::parallel_for(int64_t count, void (*task)(void* argument, int64_t index), void* argument) {
  if (count == 1 || executor_ == nullptr) {
    for (int64_t i = 0; i < count; ++i) task(argument, i);
  } else if (count > 1) {
    executor_->parallel_for(executor_->context, count, task, argument);
  }
}

CallRuntime::Block CallRuntime::make_block(size_t bytes) {
  if (bytes > SIZE_MAX - kAlignment) return Block{nullptr, nullptr, 0, false};
  void* memory = executor_ == nullptr ? std::malloc(bytes + kAlignment)
                                      : executor_->allocate(executor_->context, bytes + kAlignment);
  if (memory == nullptr) return Block{nullptr, nullptr, 0, false};
  return Block{memory, align_up(memory), bytes, true};
}

void CallRuntime::release(const Block& block) {
  if (executor_ == nullptr) {
    std::free(block.memory);
  } else {
    executor_->release(executor_->context, block.memory);
  }
}

void* CallRuntime::allocate(size_t bytes) {
  const Block block = make_block(bytes);
  if (block.memory == nullptr) {
    failed_ = true;
    return nullptr;
  }
  call_blocks_.push_back(block);
  return block.aligned;
}

size_t CallRuntime::mark() const { return call_blocks_.size(); }

void CallRuntime::free_since(size_t mark) {
  while (call_blocks_.size() > mark) {
    release(call_blocks_.back());
    call_blocks_.pop_back();
  }
}

void* CallRuntime::borrow(size_t bytes) {
  const std::lock_guard<std::mutex> lock(worker_mutex_);
  for (Block& block : worker_blocks_) {
    if (!block.in_use && block.bytes >= bytes) {
      block.in_use = true;
      return block.aligned;
    }
  }
  const Block block = make_block(bytes);
  if (block.memory == nullptr) {
    failed_ = true;
    return nullptr;
  }
  worker_blocks_.push_back(block);
  return block.aligned;
}

void CallRuntime::give_back(void* aligned) {
  const std::lock_guard<std::mutex> lock(worker_mutex_);
  for (Block& block : worker_blocks_) {
    if (block.aligned == aligned) block.in_use = false;
  }
}

int64_t CallRuntime::threads() const { return executor_ == nullptr || executor_->threads < 1 ? 1 : executor_->threads; }

bool CallRuntime::failed() const { return failed_; }

}  // namespace qknorm
