// One call of an operator after all checks: sizes, strides and pointers that the kernels can trust.
//
// Shared by the kernels of all instruction sets, so it holds data and declarations only: an inline function here would
// be compiled several times with different instructions, and the linker would keep any one of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "qknorm/qk_norm_params.h"

namespace qknorm {

class Runtime;

// An input that is broadcast over (batch, head, position, last axis); strides in elements, 0 where it is repeated.
struct StridedInput {
  const void* data;
  int32_t dtype;  // QKNORM_ABSENT: not given
  int64_t stride[4];
};

struct RotaryPlan {
  spec::RotaryOrder order;
  bool interleaved;
  int64_t size;  // rotated values R
  int64_t offset;
  int64_t sections;
  int64_t table_width;  // R or R / 2
  StridedInput cos;
  StridedInput sin;
};

// A gain or bias: (D) repeated for each head, or (H * D).
struct HeadParameter {
  const void* data;
  int32_t dtype;
  int64_t head_stride;
};

// How the rows of one tensor of heads (B, L, H * D) are normalised, rotated and scaled.
struct PreparationPlan {
  const void* x;
  int32_t dtype;
  int64_t batch;
  int64_t length;
  int64_t num_heads;
  int64_t head_size;
  spec::NormKind kind;
  spec::EpsilonMode epsilon_mode;
  double epsilon;
  bool hidden_axis;
  bool round_before_weight;  // norm_weight_order `after_cast` in a type narrower than the arithmetic
  int64_t groups;
  HeadParameter weight;
  HeadParameter bias;
  RotaryPlan rotary;
  StridedInput scale;
};

struct AttentionProblem {
  int32_t dtype;
  bool in_double;  // arithmetic in float64 instead of float32
  int64_t batch;
  int64_t num_queries;   // S
  int64_t num_new_keys;  // N
  int64_t q_heads;
  int64_t kv_heads;
  int64_t head_size;    // D
  int64_t value_size;   // Dv
  int64_t past_rows;    // P, rows of the past buffers
  int64_t total_rows;   // T, rows of the present buffers
  int64_t longest_row;  // the most valid entries that a row has after the call
  PreparationPlan query;
  PreparationPlan key;
  const void* value;
  const void* past_key;
  const void* past_value;
  void* present_key;
  void* present_value;
  void* y;
  const int64_t* cache_length;
  const int64_t* query_offset;
  double scale;
  double softcap;
  double logit_clamp;
  int64_t keys_before;      // a query at p sees keys from p - keys_before ...
  int64_t keys_after;       // ... to p + keys_after
  StridedInput bias;        // QKNORM_BOOL: a mask
  int64_t columns_of_bias;  // keys from here on are not seen
  StridedInput sink;        // stride[1] over the heads
};

struct RotaryProblem {
  bool in_double;
  PreparationPlan preparation;
  void* y;
};

// The kernels of one instruction set.
struct KernelTable {
  const char* name;
  void (*attention)(const AttentionProblem& problem, Runtime& runtime);
  void (*rotary)(const RotaryProblem& problem, Runtime& runtime);
};

// Attributes beyond this are refused: no tensor has so many of anything.
constexpr int64_t kLargestInteger = int64_t{1} << 40;

// Positions further out are moved here, where they see the same keys: a call has at most 2^48 keys, and a window 2^40.
constexpr int64_t kFarthestPosition = int64_t{1} << 61;

// A window that no position reaches the end of, and no sum with one overflows.
constexpr int64_t kUnlimited = int64_t{1} << 62;

}  // namespace qknorm
