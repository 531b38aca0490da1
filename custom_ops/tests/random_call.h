// Random calls of the plain C door: mostly right, often with something wrong, with buffers of exactly the right size,
// so that AddressSanitizer sees each read and write beyond them.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "qknorm/qk_norm_params.h"

namespace qknorm::testing {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  // In [low, high].
  int64_t integer(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine_); }
  bool chance(double probability) { return std::bernoulli_distribution(probability)(engine_); }
  double normal() { return std::normal_distribution<double>()(engine_); }
  int64_t pick(const std::vector<int64_t>& values) {
    return values[static_cast<size_t>(integer(0, static_cast<int64_t>(values.size()) - 1))];
  }

 private:
  std::mt19937_64 engine_;
};

int64_t value_bytes(int64_t dtype);
uint64_t encode(int64_t dtype, double value);               // the bits of a value in the low bytes
double decode(int64_t dtype, const void* data, int64_t i);  // element i

// A tensor that owns its memory.
class Tensor {
 public:
  Tensor() = default;
  Tensor(int64_t dtype, std::vector<int64_t> dims);

  bool given() const { return dtype_ != QKNORM_ABSENT; }
  int64_t dtype() const { return dtype_; }
  int64_t count() const;
  void set(int64_t i, double value);
  double get(int64_t i) const { return decode(dtype_, data_.get(), i); }
  void fill_normal(Random& random, double mean, double deviation);
  void fill(double value);
  void* data() const { return data_.get(); }
  std::vector<int64_t>& dims() { return dims_; }
  qknorm_tensor view() const;

 private:
  int64_t dtype_ = QKNORM_ABSENT;
  std::vector<int64_t> dims_;
  std::unique_ptr<char[]> data_;
};

struct AttentionCall {
  spec::AttentionAttributes attributes{};
  std::vector<Tensor> inputs{static_cast<size_t>(spec::kAttentionInputCount)};
};

struct RotaryCall {
  spec::RotaryAttributes attributes{};
  std::vector<Tensor> inputs{static_cast<size_t>(spec::kRotaryInputCount)};
};

AttentionCall random_attention(Random& random);
RotaryCall random_rotary(Random& random);

// Breaks something: a rank, a dimension, a type, an attribute, a missing input, a value of cache_length.
void break_call(Random& random, const spec::AttributeRow* rows, size_t row_count, void* attributes,
                std::vector<Tensor>& inputs);

std::vector<qknorm_tensor> views(const std::vector<Tensor>& inputs);

// An executor on `threads` threads.
class ThreadExecutor {
 public:
  explicit ThreadExecutor(int64_t threads);
  const qknorm_executor* get() const { return &executor_; }

 private:
  qknorm_executor executor_;
};

}  // namespace qknorm::testing
