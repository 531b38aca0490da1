#include "kernels/cpu/check.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/check_tensors.h"
#include "kernels/cpu/meaning.h"

namespace qknorm {
namespace {

using spec::EpsilonMode;
using spec::NormAxis;
using spec::NormKind;
using spec::NormWeightOrder;
using spec::RotaryOrder;
using spec::SoftmaxPrecision;

// The fields that a norm and a rotary embedding have in both operators.
struct PreparationAttributes {
  int64_t num_heads;
  NormKind kind;
  double epsilon;
  NormAxis axis;
  int64_t groups;
  EpsilonMode epsilon_mode;
  NormWeightOrder weight_order;
  RotaryOrder order;
  bool interleaved;
  int64_t embedding_dim;
  int64_t offset;
  int64_t sections;
};

// The names of one preparation's inputs, and where they are.
struct PreparationInputs {
  const char* x_name;
  const char* weight_name;
  const char* bias_name;
  const char* scale_name;  // NULL: none
  const qknorm_tensor* x;
  const qknorm_tensor* weight;
  const qknorm_tensor* bias;
  const qknorm_tensor* scale;
  const qknorm_tensor* cos;
  const qknorm_tensor* sin;
  int64_t table_heads;  // heads that a table with a head axis must have
};

std::string number(double value) {
  std::string text = std::to_string(value);
  text.erase(text.find_last_not_of('0') + 1);
  return text.back() == '.' ? text + "0" : text;
}

// A field that is added to the spec does not compile before somebody has said here, and in the kernels, what it does.
static_assert(
    std::size(spec::kAttentionAttributes) == 22 && std::size(spec::kRotaryAttributes) == 12,
    "the spec's fields are others than those that the kernels know: teach them the new ones, then count here");

// For example `0 (none), 1 (rms)`.
std::string choices_text(const spec::AttributeRow& row) {
  std::string text;
  for (size_t i = 0; i < row.choice_count; ++i) {
    text += (i ? ", " : "") + std::to_string(i) + " (" + row.choices[i] + ")";
  }
  return text;
}

// What an integer attribute must be; empty where it is.
std::string expected_integer(const spec::AttributeRow& row, int64_t value) {
  switch (row.kind) {
    case spec::AttributeKind::kChoice:
      if (value >= 0 && value < static_cast<int64_t>(row.choice_count)) return "";
      return "one of " + choices_text(row);
    case spec::AttributeKind::kBoolean:
      return value == 0 || value == 1 ? "" : "0 or 1";
    case spec::AttributeKind::kInteger:
      return value >= -kLargestInteger && value <= kLargestInteger ? "" : "within +- 2^40";
    case spec::AttributeKind::kReal:
      break;
  }
  return "a float";
}

// What comes in as a number is one that the spec knows, before anything is cast to an enumeration.
std::string check_values(const spec::AttributeRow* rows, size_t count, const void* attributes) {
  for (size_t i = 0; i < count; ++i) {
    const spec::AttributeRow& row = rows[i];
    const char* field = static_cast<const char*>(attributes) + row.offset;
    if (row.kind == spec::AttributeKind::kReal) {
      const double value = *reinterpret_cast<const double*>(field);
      if (!std::isfinite(value)) return std::string("attribute ") + row.name + " must be finite";
      continue;
    }
    const int64_t value = *reinterpret_cast<const int64_t*>(field);
    const std::string expected = expected_integer(row, value);
    if (!expected.empty()) {
      return std::string("attribute ") + row.name + " is " + std::to_string(value) + "; it must be " + expected;
    }
  }
  return "";
}

// What is wrong with an epsilon under the root of a norm of this kind.
std::string check_epsilon_inside(NormKind kind) {
  switch (kind) {
    case NormKind::kNone:
    case NormKind::kRms:
    case NormKind::kLayer:
      return "";
    case NormKind::kL2:
      return "a norm 'l2' with epsilon_mode 'inside_sqrt' is spelled as 'rms' with epsilon / D and a weight of "
             "1 / sqrt(D); use epsilon_mode 'clamp' or 'outside_sqrt'";
  }
  return "the kind of norm is unknown";
}

std::string check_epsilon(NormKind kind, double epsilon, EpsilonMode mode) {
  if (epsilon < 0) return "an epsilon is " + number(epsilon) + "; it must not be negative";
  switch (mode) {
    case EpsilonMode::kInsideSqrt:
      return check_epsilon_inside(kind);
    case EpsilonMode::kClamp:
    case EpsilonMode::kOutsideSqrt:
      return "";
  }
  return "the epsilon_mode is unknown";
}

std::string check_preparation_attributes(const PreparationAttributes& a) {
  if (a.groups < 1) return "attribute norm_groups is " + std::to_string(a.groups) + "; it must be at least 1";
  const std::string wrong = check_epsilon(a.kind, a.epsilon, a.epsilon_mode);
  if (!wrong.empty()) return wrong;
  if (a.embedding_dim < 0 || a.offset < 0 || a.sections < 1) {
    return "attributes rotary_embedding_dim " + std::to_string(a.embedding_dim) + " and rotary_offset " +
           std::to_string(a.offset) + " must not be negative, rotary_sections " + std::to_string(a.sections) +
           " must be at least 1";
  }
  if (a.embedding_dim % (2 * a.sections) != 0) {
    return "attribute rotary_embedding_dim " + std::to_string(a.embedding_dim) +
           " must be a multiple of 2 * rotary_sections = " + std::to_string(2 * a.sections);
  }
  if (a.offset > 0 && a.embedding_dim == 0) return "attribute rotary_offset needs rotary_embedding_dim";
  return "";
}

PreparationAttributes preparation_of(const spec::AttentionAttributes& a, bool of_query) {
  const auto kind = static_cast<NormKind>(of_query ? a.q_norm : a.k_norm);
  return {of_query ? a.q_num_heads : a.kv_num_heads,
          kind,
          of_query ? a.q_epsilon : a.k_epsilon,
          static_cast<NormAxis>(a.norm_axis),
          a.norm_groups,
          static_cast<EpsilonMode>(a.epsilon_mode),
          static_cast<NormWeightOrder>(a.norm_weight_order),
          static_cast<RotaryOrder>(a.rotary_order),
          a.rotary_interleaved != 0,
          a.rotary_embedding_dim,
          a.rotary_offset,
          a.rotary_sections};
}

PreparationAttributes preparation_of(const spec::RotaryAttributes& a) {
  return {a.num_heads,
          static_cast<NormKind>(a.norm),
          a.epsilon,
          static_cast<NormAxis>(a.norm_axis),
          a.norm_groups,
          static_cast<EpsilonMode>(a.epsilon_mode),
          static_cast<NormWeightOrder>(a.norm_weight_order),
          static_cast<RotaryOrder>(a.rotary_order),
          a.rotary_interleaved != 0,
          a.rotary_embedding_dim,
          a.rotary_offset,
          a.rotary_sections};
}

std::string plan_rotary(const PreparationAttributes& a, const PreparationInputs& in, PreparationPlan* plan) {
  RotaryPlan& rotary = plan->rotary;
  rotary.order = a.order;
  rotary.cos.dtype = rotary.sin.dtype = QKNORM_ABSENT;
  if (!rotates(a.order)) {
    if (is_given(*in.cos)) return "cos is given, but rotary_order is 'none'";
    if (is_given(*in.sin)) return "sin is given, but rotary_order is 'none'";
    return "";
  }
  if (!is_given(*in.cos) || !is_given(*in.sin)) return "rotary_order is set: the inputs cos and sin are both needed";
  rotary.interleaved = a.interleaved;
  rotary.size = a.embedding_dim > 0 ? a.embedding_dim : plan->head_size;
  rotary.offset = a.offset;
  rotary.sections = a.sections;
  if (rotary.offset + rotary.size > plan->head_size) {
    return "rotary_offset " + std::to_string(rotary.offset) + " + rotary_embedding_dim " + std::to_string(rotary.size) +
           " exceeds the head size " + std::to_string(plan->head_size);
  }
  if (rotary.size % (2 * rotary.sections) != 0) {
    return std::to_string(rotary.size) + " rotated values cannot be split into " + std::to_string(rotary.sections) +
           " section(s) of pairs: make the head size even or set rotary_embedding_dim";
  }
  std::string wrong = rotary_table("cos", *in.cos, *plan, in.table_heads, &rotary.cos);
  if (wrong.empty()) wrong = rotary_table("sin", *in.sin, *plan, in.table_heads, &rotary.sin);
  if (!wrong.empty()) return wrong;
  rotary.table_width = in.cos->dims[in.cos->rank - 1];
  if (rotary.table_width != in.sin->dims[in.sin->rank - 1]) {
    return "cos has shape " + shape_text(*in.cos) + " and sin " + shape_text(*in.sin) + "; their widths must be equal";
  }
  return "";
}

// `in.x` has been checked to have three dimensions that split into the heads.
std::string plan_preparation(const PreparationAttributes& a, const PreparationInputs& in, PreparationPlan* plan) {
  const qknorm_tensor& x = *in.x;
  const bool normalised = normalises(a.kind);
  plan->x = x.data;
  plan->dtype = static_cast<int32_t>(x.dtype);
  plan->batch = x.dims[0];
  plan->length = x.dims[1];
  plan->num_heads = a.num_heads;
  plan->head_size = x.dims[2] / a.num_heads;
  plan->kind = a.kind;
  plan->epsilon_mode = a.epsilon_mode;
  plan->epsilon = a.epsilon;
  plan->hidden_axis = normalised && spans_heads(a.axis);
  plan->groups = a.groups;
  const bool narrow = x.dtype == QKNORM_FLOAT16 || x.dtype == QKNORM_BFLOAT16;
  plan->round_before_weight = narrow && rounds_before_weight(a.weight_order);
  if (plan->head_size < 1) return std::string(in.x_name) + " has shape " + shape_text(x) + "; its heads are empty";
  const int64_t row = spans_heads(a.axis) ? x.dims[2] : plan->head_size;
  if (row % a.groups != 0) {
    return "norm_groups " + std::to_string(a.groups) + " does not divide the " + std::to_string(row) +
           " values of a normalised row of " + in.x_name;
  }
  std::string wrong =
      head_parameter(in.weight_name, *in.weight, a.num_heads, plan->head_size, normalised, &plan->weight);
  if (wrong.empty()) {
    wrong = head_parameter(in.bias_name, *in.bias, a.num_heads, plan->head_size, normalised, &plan->bias);
  }
  if (wrong.empty()) wrong = plan_rotary(a, in, plan);
  plan->scale.dtype = QKNORM_ABSENT;
  if (wrong.empty() && in.scale_name != nullptr && is_given(*in.scale)) {
    wrong =
        broadcast(in.scale_name, *in.scale, {plan->batch, a.num_heads, plan->length, plan->head_size}, &plan->scale);
  }
  return wrong;
}

std::string check_query_key_value(const spec::AttentionAttributes& a, const qknorm_tensor* inputs) {
  const qknorm_tensor& query = inputs[spec::kAttentionInputQuery];
  const qknorm_tensor& key = inputs[spec::kAttentionInputKey];
  const qknorm_tensor& value = inputs[spec::kAttentionInputValue];
  for (int i = 0; i < 3; ++i) {
    std::string wrong = check_rank(spec::kAttentionInputs[i].name, inputs[i], 3);
    if (wrong.empty()) {
      wrong = check_heads(spec::kAttentionInputs[i].name, inputs[i], i == 0 ? a.q_num_heads : a.kv_num_heads);
    }
    if (!wrong.empty()) return wrong;
    if (inputs[i].dims[0] != query.dims[0]) {
      return std::string(spec::kAttentionInputs[i].name) + " has shape " + shape_text(inputs[i]) +
             "; its batch size must be the query's, " + std::to_string(query.dims[0]);
    }
  }
  const int64_t head_size = query.dims[2] / a.q_num_heads;
  if (key.dims[2] / a.kv_num_heads != head_size) {
    return "key has shape " + shape_text(key) + ", head size " + std::to_string(key.dims[2] / a.kv_num_heads) + "; " +
           std::to_string(head_size) + " is expected, as in query " + shape_text(query);
  }
  if (value.dims[1] != key.dims[1]) {
    return "value has shape " + shape_text(value) + "; it needs as many positions as key " + shape_text(key);
  }
  if (rotates(static_cast<RotaryOrder>(a.rotary_order)) && key.dims[1] != query.dims[1]) {
    return "key has shape " + shape_text(key) +
           "; with a rotary embedding it shares the tables of the query and needs " + std::to_string(query.dims[1]) +
           " positions";
  }
  return "";
}

// How many entries the rows have with the new ones, and with them the buffers: these grow where there is no room.
std::string plan_rows(const qknorm_tensor& past_key, AttentionProblem* p) {
  p->longest_row = 0;
  for (int64_t row = 0; row < p->batch; ++row) {
    const int64_t valid = p->cache_length[row];
    if (valid < 0 || valid > p->past_rows) {
      return "cache_length[" + std::to_string(row) + "] is " + std::to_string(valid) + "; it must be within 0 .. " +
             std::to_string(p->past_rows) + ", as many entries as past_key " + shape_text(past_key) + " has";
    }
    p->longest_row = std::max(p->longest_row, valid + p->num_new_keys);
  }
  p->total_rows = std::max(p->past_rows, p->longest_row);
  return "";
}

// The bias, which with cache_length may lack columns: keys behind its last one are not seen.
std::string plan_bias(const qknorm_tensor& bias, AttentionProblem* p) {
  const bool may_lack_columns = p->cache_length != nullptr && bias.rank > 0;
  const int64_t columns = may_lack_columns ? bias.dims[bias.rank - 1] : p->total_rows;
  const std::string wrong =
      broadcast("attention_bias", bias, {p->batch, p->q_heads, p->num_queries, columns}, &p->bias);
  if (!wrong.empty() || !may_lack_columns || columns == 1) return wrong;
  p->columns_of_bias = columns;
  if (columns <= p->total_rows) return "";
  const int64_t most = p->past_rows + p->num_new_keys;
  return "attention_bias has shape " + shape_text(bias) + "; there are " +
         (columns > most ? "at most " + std::to_string(most) : std::to_string(p->total_rows)) + " keys";
}

// Past buffers, cache_length and query_offset; sets everything that depends on them.
std::string plan_cache(const qknorm_tensor* inputs, AttentionProblem* p) {
  const qknorm_tensor& past_key = inputs[spec::kAttentionInputPastKey];
  const qknorm_tensor& past_value = inputs[spec::kAttentionInputPastValue];
  const qknorm_tensor& cache_length = inputs[spec::kAttentionInputCacheLength];
  const qknorm_tensor& query_offset = inputs[spec::kAttentionInputQueryOffset];
  if (is_given(past_key) != is_given(past_value)) return "past_key and past_value must be given together";
  if (is_given(cache_length) && !is_given(past_key)) {
    return "cache_length needs past_key and past_value, the buffers that it speaks of";
  }
  if (is_given(query_offset) && is_given(past_key)) {
    return "query_offset is for attention without a cache; past_key already says where the queries are";
  }
  std::string wrong;
  if (is_given(past_key)) {
    wrong = check_rank("past_key", past_key, 4);
    if (wrong.empty()) {
      wrong = check_exact("past_key", past_key, {p->batch, p->kv_heads, past_key.dims[2], p->head_size});
    }
    if (wrong.empty()) {
      wrong = check_exact("past_value", past_value, {p->batch, p->kv_heads, past_key.dims[2], p->value_size});
    }
    if (!wrong.empty()) return wrong;
    p->past_key = past_key.data;
    p->past_value = past_value.data;
    p->past_rows = past_key.dims[2];
  }
  p->total_rows = p->longest_row = p->past_rows + p->num_new_keys;
  if (is_given(cache_length)) wrong = check_exact("cache_length", cache_length, {p->batch});
  if (wrong.empty() && is_given(query_offset)) wrong = check_exact("query_offset", query_offset, {p->batch});
  if (!wrong.empty()) return wrong;
  p->cache_length = is_given(cache_length) ? static_cast<const int64_t*>(cache_length.data) : nullptr;
  p->query_offset = is_given(query_offset) ? static_cast<const int64_t*>(query_offset.data) : nullptr;
  return is_given(cache_length) ? plan_rows(past_key, p) : "";
}

std::string plan_logits(const spec::AttentionAttributes& a, const qknorm_tensor* inputs, AttentionProblem* p) {
  p->scale = a.scale;
  p->softcap = a.softcap;
  p->logit_clamp = a.logit_clamp;
  p->keys_before = a.left_window_size < 0 ? kUnlimited : a.left_window_size;
  p->keys_after = a.right_window_size < 0 ? kUnlimited : a.right_window_size;
  if (a.is_causal != 0) p->keys_after = 0;
  const qknorm_tensor& bias = inputs[spec::kAttentionInputAttentionBias];
  const qknorm_tensor& sink = inputs[spec::kAttentionInputHeadSink];
  std::string wrong;
  p->columns_of_bias = kUnlimited;
  if (is_given(bias)) wrong = plan_bias(bias, p);
  if (wrong.empty() && is_given(sink)) {
    wrong = check_exact("head_sink", sink, {p->q_heads});
    if (wrong.empty()) wrong = broadcast("head_sink", sink, {p->q_heads}, &p->sink);
  }
  return wrong;
}

}  // namespace

std::string check_attributes(const spec::AttentionAttributes& a) {
  std::string wrong = check_values(spec::kAttentionAttributes, std::size(spec::kAttentionAttributes), &a);
  if (!wrong.empty()) return wrong;
  if (a.q_num_heads < 1 || a.kv_num_heads < 1) {
    return "attributes q_num_heads " + std::to_string(a.q_num_heads) + " and kv_num_heads " +
           std::to_string(a.kv_num_heads) + " must be at least 1";
  }
  if (a.q_num_heads % a.kv_num_heads != 0) {
    return "q_num_heads " + std::to_string(a.q_num_heads) + " is not a multiple of kv_num_heads " +
           std::to_string(a.kv_num_heads);
  }
  if (a.softcap < 0) return "attribute softcap is " + number(a.softcap) + "; it must not be negative (0 is off)";
  if (a.logit_clamp < 0) {
    return "attribute logit_clamp is " + number(a.logit_clamp) + "; it must not be negative (0 is off)";
  }
  if (a.left_window_size < -1 || a.right_window_size < -1) {
    return "attributes left_window_size " + std::to_string(a.left_window_size) + " and right_window_size " +
           std::to_string(a.right_window_size) + " must be at least 0, or -1 for no window";
  }
  const bool has_norm = normalises(static_cast<NormKind>(a.q_norm)) || normalises(static_cast<NormKind>(a.k_norm));
  if (rotates_before_norm(static_cast<RotaryOrder>(a.rotary_order))) {
    if (!has_norm) return "rotary_order 'before_norm' needs a norm; without one use 'after_norm'";
    if (spans_heads(static_cast<NormAxis>(a.norm_axis))) {
      return "rotary_order 'before_norm' needs norm_axis 'head': a hidden norm runs before the head split";
    }
  }
  wrong = check_preparation_attributes(preparation_of(a, true));
  return wrong.empty() ? check_preparation_attributes(preparation_of(a, false)) : wrong;
}

std::string check_attributes(const spec::RotaryAttributes& a) {
  const std::string wrong = check_values(spec::kRotaryAttributes, std::size(spec::kRotaryAttributes), &a);
  if (!wrong.empty()) return wrong;
  if (a.num_heads < 1) return "attribute num_heads is " + std::to_string(a.num_heads) + "; it must be at least 1";
  return check_preparation_attributes(preparation_of(a));
}

std::string make_attention_problem(const spec::AttentionAttributes& a, const qknorm_tensor* inputs,
                                   AttentionProblem* p) {
  *p = AttentionProblem{};
  std::string wrong = check_attributes(a);
  if (wrong.empty()) wrong = check_types(spec::kAttentionInputs, spec::kAttentionInputCount, inputs, &p->dtype);
  if (wrong.empty()) wrong = check_query_key_value(a, inputs);
  if (!wrong.empty()) return wrong;
  const qknorm_tensor& query = inputs[spec::kAttentionInputQuery];
  const qknorm_tensor& key = inputs[spec::kAttentionInputKey];
  p->in_double = p->dtype == QKNORM_DOUBLE || needs_float64(static_cast<SoftmaxPrecision>(a.softmax_precision));
  p->batch = query.dims[0];
  p->num_queries = query.dims[1];
  p->num_new_keys = key.dims[1];
  p->q_heads = a.q_num_heads;
  p->kv_heads = a.kv_num_heads;
  p->head_size = query.dims[2] / a.q_num_heads;
  p->value_size = inputs[spec::kAttentionInputValue].dims[2] / a.kv_num_heads;
  p->value = inputs[spec::kAttentionInputValue].data;
  if (p->value_size < 1)
    return "value has shape " + shape_text(inputs[spec::kAttentionInputValue]) + "; its heads are empty";

  PreparationInputs of_query = {"query",
                                "q_norm_weight",
                                "q_norm_bias",
                                "q_scale",
                                &query,
                                &inputs[spec::kAttentionInputQNormWeight],
                                &inputs[spec::kAttentionInputQNormBias],
                                &inputs[spec::kAttentionInputQScale],
                                &inputs[spec::kAttentionInputCos],
                                &inputs[spec::kAttentionInputSin],
                                a.q_num_heads == a.kv_num_heads ? a.q_num_heads : 1};
  PreparationInputs of_key = of_query;
  of_key.x_name = "key";
  of_key.weight_name = "k_norm_weight";
  of_key.bias_name = "k_norm_bias";
  of_key.scale_name = nullptr;
  of_key.x = &key;
  of_key.weight = &inputs[spec::kAttentionInputKNormWeight];
  of_key.bias = &inputs[spec::kAttentionInputKNormBias];
  wrong = plan_preparation(preparation_of(a, true), of_query, &p->query);
  if (wrong.empty()) wrong = plan_preparation(preparation_of(a, false), of_key, &p->key);
  if (wrong.empty()) wrong = plan_cache(inputs, p);
  if (wrong.empty()) wrong = plan_logits(a, inputs, p);
  return wrong;
}

std::string make_rotary_problem(const spec::RotaryAttributes& a, const qknorm_tensor* inputs, RotaryProblem* p) {
  *p = RotaryProblem{};
  int32_t dtype = 0;
  const qknorm_tensor& x = inputs[spec::kRotaryInputX];
  std::string wrong = check_attributes(a);
  if (wrong.empty()) wrong = check_types(spec::kRotaryInputs, spec::kRotaryInputCount, inputs, &dtype);
  if (wrong.empty()) wrong = check_rank("x", x, 3);
  if (wrong.empty()) wrong = check_heads("x", x, a.num_heads);
  if (!wrong.empty()) return wrong;
  p->in_double = dtype == QKNORM_DOUBLE;
  const PreparationInputs of_x = {"x",
                                  "weight",
                                  "bias",
                                  "scale",
                                  &x,
                                  &inputs[spec::kRotaryInputWeight],
                                  &inputs[spec::kRotaryInputBias],
                                  &inputs[spec::kRotaryInputScale],
                                  &inputs[spec::kRotaryInputCos],
                                  &inputs[spec::kRotaryInputSin],
                                  a.num_heads};
  return plan_preparation(preparation_of(a), of_x, &p->preparation);
}

}  // namespace qknorm
