#include "ort/cuda_arguments.h"

#include <algorithm>
#include <stdexcept>

#include "kernels/cpu/meaning.h"

namespace qknorm::cuda {
namespace {

using Names = std::vector<const char*>;

const Names kSideFields = {"x",         "batch_stride", "row_stride",   "weight",      "weight_stride",
                           "bias",      "bias_stride",  "scale",        "scale_batch", "scale_head",
                           "scale_row", "scale_column", "statistics",   "groups",      "group_size",
                           "flags",     "epsilon",      "inverse_count"};
const Names kRotaryFields = {"cos", "sin", "batch_stride", "head_stride", "row_stride", "size", "section", "offset"};
const Names kRowsFields = {"data", "batch_stride", "head_stride", "row_stride"};
const Names kPositionsFields = {"starts", "kind", "first", "new_keys", "capacity"};
const Names kMaskFields = {"data", "kind", "batch_stride", "head_stride", "row_stride", "column_stride"};
const Names kLogitsFields = {"scale", "clamp", "cap", "keys_before", "keys_after", "sink", "has_sink", "sink_float32"};
const Names kPlain = {};

struct Argument {
  const char* name;
  const Names* fields;
};

std::vector<Argument> arguments_of(KernelKind kernel) {
  switch (kernel) {
    case KernelKind::kPrepare:
      return {{"query", &kSideFields},
              {"key", &kSideFields},
              {"value", &kRowsFields},
              {"rotary", &kRotaryFields},
              {"query_out", &kRowsFields},
              {"key_out", &kRowsFields},
              {"value_out", &kRowsFields},
              {"positions", &kPositionsFields},
              {"num_queries", &kPlain},
              {"q_heads", &kPlain},
              {"kv_heads", &kPlain},
              {"D", &kPlain},
              {"Dv", &kPlain}};
    case KernelKind::kRowStatistics:
      return {{"side", &kSideFields}, {"out", &kPlain}, {"length", &kPlain}};
    case KernelKind::kPrefill:
      return {{"query", &kRowsFields},
              {"keys", &kRowsFields},
              {"values", &kRowsFields},
              {"out", &kRowsFields},
              {"mask", &kMaskFields},
              {"logits", &kLogitsFields},
              {"positions", &kPositionsFields},
              {"num_queries", &kPlain},
              {"group", &kPlain},
              {"D", &kPlain},
              {"Dv", &kPlain}};
    case KernelKind::kDecode:
      return {{"query", &kSideFields},
              {"key", &kSideFields},
              {"value", &kRowsFields},
              {"rotary", &kRotaryFields},
              {"keys", &kRowsFields},
              {"values", &kRowsFields},
              {"out", &kRowsFields},
              {"partial", &kPlain},
              {"partial_state", &kPlain},
              {"mask", &kMaskFields},
              {"logits", &kLogitsFields},
              {"positions", &kPositionsFields},
              {"group", &kPlain},
              {"D", &kPlain},
              {"Dv", &kPlain}};
    case KernelKind::kCombine:
      return {{"partial", &kPlain},       {"partial_state", &kPlain}, {"out", &kRowsFields},
              {"logits", &kLogitsFields}, {"splits", &kPlain},        {"Dv", &kPlain}};
  }
  return {};
}

// A section of any multiple of 16 serves where nothing is rotated: it only divides.
constexpr int64_t kUnrotatedSection = 16;
constexpr int64_t kFarthestKey = int64_t{1} << 30;

bool is_wide(const StridedInput& input) { return input.dtype == QKNORM_FLOAT; }

[[noreturn]] void refuse_unknown(const char* what) {
  throw std::invalid_argument(std::string("there is no CUDA kernel for this ") + what + ": it is none that was known");
}

int32_t flags_of_kind(spec::NormKind kind) {
  switch (kind) {
    case spec::NormKind::kNone:
      return 0;
    case spec::NormKind::kRms:
    case spec::NormKind::kL2:
      return kNormalised;
    case spec::NormKind::kLayer:
      return kNormalised | kCentred;
  }
  refuse_unknown("norm");
}

// 1 / (the values that a mean of squares is over), 1 for their sum.
double inverse_count(spec::NormKind kind, int64_t count) {
  switch (kind) {
    case spec::NormKind::kNone:
    case spec::NormKind::kRms:
    case spec::NormKind::kLayer:
      return 1.0 / static_cast<double>(count);
    case spec::NormKind::kL2:
      return 1.0;
  }
  refuse_unknown("norm");
}

int32_t flags_of_epsilon(spec::EpsilonMode mode) {
  switch (mode) {
    case spec::EpsilonMode::kInsideSqrt:
      return 0;
    case spec::EpsilonMode::kClamp:
      return kClamped;
    case spec::EpsilonMode::kOutsideSqrt:
      return kEpsilonOutside;
  }
  refuse_unknown("epsilon_mode");
}

// Without a norm the order makes no difference, and the kernels rotate last.
int32_t flags_of_rotary(spec::RotaryOrder order, bool normed) {
  switch (order) {
    case spec::RotaryOrder::kNone:
      return 0;
    case spec::RotaryOrder::kAfterNorm:
      return kRotatedLast;
    case spec::RotaryOrder::kBeforeNorm:
      return normed ? kRotatedFirst : kRotatedLast;
  }
  refuse_unknown("rotary_order");
}

}  // namespace

Rows rows_of_projection(const void* data, int64_t length, int64_t heads, int64_t size) {
  return {data, length * heads * size, size, heads * size};
}

Rows rows_of_heads(const void* data, int64_t length, int64_t heads, int64_t size) {
  return {data, heads * length * size, length * size, size};
}

bool needs_statistics(const PreparationPlan& plan) {
  return normalises(plan.kind) && (plan.hidden_axis || plan.groups > 1);
}

int64_t group_size(const PreparationPlan& plan) {
  const int64_t row = plan.hidden_axis ? plan.num_heads * plan.head_size : plan.head_size;
  return std::max<int64_t>(row / plan.groups, 1);
}

int32_t side_flags(const PreparationPlan& plan) {
  const bool normed = normalises(plan.kind);
  int32_t flags = flags_of_kind(plan.kind) | flags_of_rotary(plan.rotary.order, normed);
  if (normed) flags |= flags_of_epsilon(plan.epsilon_mode);
  const auto set = [&flags](bool condition, SideFlag flag) { flags |= condition ? flag : 0; };
  set(plan.round_before_weight, kRounded);
  set(plan.weight.dtype != QKNORM_ABSENT, kWeight);
  set(plan.weight.dtype == QKNORM_FLOAT, kWeightFloat32);
  set(plan.bias.dtype != QKNORM_ABSENT, kBias);
  set(plan.bias.dtype == QKNORM_FLOAT, kBiasFloat32);
  set(is_wide(plan.rotary.cos), kTableFloat32);
  set(rotates(plan.rotary.order) && plan.rotary.table_width == plan.rotary.size, kTableWide);
  set(plan.scale.dtype != QKNORM_ABSENT, kScale);
  set(is_wide(plan.scale), kScaleFloat32);
  return flags;
}

void Arguments::side(const PreparationPlan& plan, const Statistics& statistics) {
  const int64_t width = plan.num_heads * plan.head_size;
  const int64_t group = group_size(plan);
  const bool scaled = plan.scale.dtype != QKNORM_ABSENT;
  pointer(plan.x);
  integer(plan.length * width);
  integer(width);
  pointer(plan.weight.data);
  integer(plan.weight.dtype != QKNORM_ABSENT ? plan.weight.head_stride : 0);
  pointer(plan.bias.data);
  integer(plan.bias.dtype != QKNORM_ABSENT ? plan.bias.head_stride : 0);
  pointer(plan.scale.data);
  for (int axis = 0; axis < 4; ++axis) integer(scaled ? plan.scale.stride[axis] : 0);
  pointer(statistics.data);
  integer(width / group);
  integer(group);
  integer(side_flags(plan));
  real(plan.epsilon);
  real(inverse_count(plan.kind, group));
}

void Arguments::rotary(const RotaryPlan& plan) {
  const bool rotated = rotates(plan.order);
  pointer(rotated ? plan.cos.data : nullptr);
  pointer(rotated ? plan.sin.data : nullptr);
  for (int axis = 0; axis < 3; ++axis) integer(rotated ? plan.cos.stride[axis] : 0);
  integer(rotated ? plan.size : 0);
  integer(rotated ? plan.size / plan.sections : kUnrotatedSection);
  integer(rotated ? plan.offset : 0);
}

void Arguments::rows(const Rows& rows) {
  pointer(rows.data);
  integer(rows.batch);
  integer(rows.head);
  integer(rows.row);
}

void Arguments::positions(const AttentionProblem& problem, const int64_t* cache_length) {
  const bool fixed = problem.cache_length != nullptr;
  const bool offset = problem.query_offset != nullptr;
  pointer(fixed ? cache_length : problem.query_offset);
  integer(fixed ? 1 : offset ? 2 : 0);
  integer(fixed || offset ? 0 : problem.past_rows);
  integer(problem.num_new_keys);
  integer(std::min(problem.total_rows, problem.columns_of_bias));  // nothing is read behind the bias
}

void Arguments::no_positions(int64_t length) {
  pointer(nullptr);
  integer(0);
  integer(0);
  integer(length);
  integer(0);
}

void Arguments::mask(const AttentionProblem& problem) {
  const StridedInput& bias = problem.bias;
  const bool given = bias.dtype != QKNORM_ABSENT;
  pointer(given ? bias.data : nullptr);
  integer(!given ? 0 : bias.dtype == QKNORM_BOOL ? 1 : bias.dtype == problem.dtype ? 2 : 3);
  for (int axis = 0; axis < 4; ++axis) integer(given ? bias.stride[axis] : 0);
}

void Arguments::logits(const AttentionProblem& problem) {
  const bool sunk = problem.sink.dtype != QKNORM_ABSENT;
  real(problem.scale);
  real(problem.logit_clamp);
  real(problem.softcap);
  integer(std::min(problem.keys_before, kFarthestKey));
  integer(std::min(problem.keys_after, kFarthestKey));
  pointer(sunk ? problem.sink.data : nullptr);
  integer(sunk ? 1 : 0);
  integer(sunk && problem.sink.dtype == QKNORM_FLOAT ? 1 : 0);
}

std::vector<std::string> parameter_names(KernelKind kernel) {
  std::vector<std::string> names;
  for (const Argument& argument : arguments_of(kernel)) {
    if (argument.fields->empty()) names.emplace_back(argument.name);
    for (const char* field : *argument.fields) names.push_back(std::string(argument.name) + "." + field);
  }
  return names;
}

}  // namespace qknorm::cuda
