// The arguments of the Triton kernels, in the order of their parameter blocks.
//
// kernels/cuda/arguments.py and image_set.py declare them; a pack whose parameter names differ is refused when it is
// opened, so that order and number can be trusted at every launch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cpu/problem.h"

namespace qknorm::cuda {

enum class KernelKind { kPrepare, kRowStatistics, kPrefill, kDecode, kCombine };

inline constexpr const char* kKernelNames[] = {"prepare", "row_statistics", "prefill", "decode", "combine"};

// Bits of a side's flags; those of arguments.py.
enum SideFlag : int32_t {
  kNormalised = 1 << 0,
  kCentred = 1 << 1,
  kClamped = 1 << 2,
  kEpsilonOutside = 1 << 3,
  kRounded = 1 << 4,
  kWeight = 1 << 5,
  kWeightFloat32 = 1 << 6,
  kBias = 1 << 7,
  kBiasFloat32 = 1 << 8,
  kRotatedFirst = 1 << 9,
  kRotatedLast = 1 << 10,
  kTableFloat32 = 1 << 11,
  kTableWide = 1 << 12,
  kScale = 1 << 13,
  kScaleFloat32 = 1 << 14,
};

// A tensor of heads: element (b, h, s, d) at b * batch + h * head + s * row + d.
struct Rows {
  const void* data;
  int64_t batch;
  int64_t head;
  int64_t row;
};

// (B, L, H*D) seen as heads, and a dense (B, H, L, D).
Rows rows_of_projection(const void* data, int64_t length, int64_t heads, int64_t size);
Rows rows_of_heads(const void* data, int64_t length, int64_t heads, int64_t size);

struct Statistics {
  const void* data;  // NULL: each head has its own, taken in registers
};

// Values in the order of a parameter block; `real` where the parameter is a float.
struct Value {
  int64_t integer;
  double real;
};

class Arguments {
 public:
  void pointer(const void* data) { values_.push_back({reinterpret_cast<int64_t>(data), 0.0}); }
  void integer(int64_t value) { values_.push_back({value, 0.0}); }
  void real(double value) { values_.push_back({0, value}); }

  void side(const PreparationPlan& plan, const Statistics& statistics);
  void rotary(const RotaryPlan& plan);
  void rows(const Rows& rows);
  // Where new keys go and queries stand; `lengths` is cache_length or query_offset on the device.
  void positions(const AttentionProblem& problem, const int64_t* cache_length);
  void no_positions(int64_t length);
  void mask(const AttentionProblem& problem);
  void logits(const AttentionProblem& problem);

  const std::vector<Value>& values() const { return values_; }

 private:
  std::vector<Value> values_;
};

// Whether the rows that are normalised are not single heads, so that `row_statistics` must run first.
bool needs_statistics(const PreparationPlan& plan);
int64_t group_size(const PreparationPlan& plan);
int32_t side_flags(const PreparationPlan& plan);

// Names of a kernel's parameters in order, `argument` or `argument.field`.
std::vector<std::string> parameter_names(KernelKind kernel);

}  // namespace qknorm::cuda
