// Rows of q or k, ready for the dot product: norm, gain, rotary and scale in the order of the spec.
#pragma once

#include "kernels/cpu/isa/norm_stage.h"
#include "kernels/cpu/isa/parallel.h"
#include "kernels/cpu/isa/rotary_stage.h"

namespace qknorm {
namespace QKNORM_ISA {

template <class C>
constexpr int32_t dtype_of() {
  return sizeof(C) == 4 ? QKNORM_FLOAT : QKNORM_DOUBLE;
}

template <class C>
class Preparation {
 public:
  // Converts the parameters; for a hidden norm it takes the statistics of all tokens, on all threads. Check
  // runtime.failed() afterwards.
  Preparation(const PreparationPlan& plan, Runtime& runtime) : plan_(plan) {
    weight_ = parameter(plan.weight, runtime);
    bias_ = parameter(plan.bias, runtime);
    if (plan.hidden_axis && !runtime.failed()) take_hidden_statistics(runtime);
  }

  // Scratch elements that prepare() needs.
  int64_t scratch_size() const { return 2 * plan_.head_size; }

  bool is_identity() const {
    return plan_.kind == spec::NormKind::kNone && plan_.rotary.order == spec::RotaryOrder::kNone &&
           plan_.scale.dtype == QKNORM_ABSENT;
  }

  const PreparationPlan& plan() const { return plan_; }

  const void* source(int64_t batch, int64_t head, int64_t position) const {
    const int64_t row = (batch * plan_.length + position) * plan_.num_heads + head;
    return element(plan_.x, plan_.dtype, row * plan_.head_size);
  }

  // Starts to fetch a row that prepare() will need soon; the rows of one head lie far apart.
  void prefetch(int64_t batch, int64_t head, int64_t position) const {
    if (position >= plan_.length) return;
    const char* row = static_cast<const char*>(source(batch, head, position));
    const int64_t bytes = plan_.head_size * storage_size(plan_.dtype);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
  }

  // Writes head_size values times `factor` to `out`.
  void prepare(int64_t batch, int64_t head, int64_t position, C factor, C* scratch, C* out) const {
    const int64_t size = plan_.head_size;
    const bool normalised = plan_.kind != spec::NormKind::kNone;
    const bool before_norm = plan_.rotary.order == spec::RotaryOrder::kBeforeNorm;
    const C* x = out;
    if (normalised && !before_norm && plan_.dtype == dtype_of<C>()) {
      x = static_cast<const C*>(source(batch, head, position));  // read where it lies
    } else {
      read_row(plan_.dtype, source(batch, head, position), size, out);
    }
    if (before_norm) rotate_row(plan_.rotary, batch, head, position, scratch, out);
    if (normalised) {
      // All that follows is linear but for the bias: the factor can go into the norm's own.
      const bool folded = bias_ == nullptr && !plan_.round_before_weight;
      normalise(batch, head, position, folded ? factor : C(1), x, out);
      if (folded) factor = 1;
    }
    if (plan_.rotary.order == spec::RotaryOrder::kAfterNorm) {
      rotate_row(plan_.rotary, batch, head, position, scratch, out);
    }
    if (plan_.scale.dtype != QKNORM_ABSENT) scale(batch, head, position, scratch, out);
    if (factor != C(1)) multiply_row(out, factor, size);
  }

 private:
  const C* parameter(const HeadParameter& from, Runtime& runtime) const {
    if (from.dtype == QKNORM_ABSENT) return nullptr;
    if (from.dtype == dtype_of<C>()) return static_cast<const C*>(from.data);
    const int64_t count = from.head_stride == 0 ? plan_.head_size : plan_.head_size * plan_.num_heads;
    C* copy = static_cast<C*>(runtime.allocate(static_cast<size_t>(count) * sizeof(C)));
    if (copy != nullptr) read_row(from.dtype, from.data, count, copy);
    return copy;
  }

  void normalise(int64_t batch, int64_t head, int64_t position, C factor, const C* x, C* out) const {
    const int64_t size = plan_.head_size;
    const C* weight = weight_ == nullptr ? nullptr : weight_ + head * plan_.weight.head_stride;
    const C* fused_weight = plan_.round_before_weight ? nullptr : weight;
    const int64_t group = (plan_.hidden_axis ? size * plan_.num_heads : size) / plan_.groups;
    const int64_t token = batch * plan_.length + position;
    int64_t begin = 0;
    while (begin < size) {  // a group of a hidden norm may begin and end inside a head
      const int64_t first = plan_.hidden_axis ? head * size : 0;
      const int64_t index = (first + begin) / group;
      const int64_t end = smaller((index + 1) * group - first, size);
      NormStatistics statistics =
          plan_.hidden_axis ? hidden_[token * plan_.groups + index] : norm_statistics(plan_, x + begin, end - begin);
      statistics.factor *= static_cast<double>(factor);
      apply_statistics(statistics, x + begin, fused_weight == nullptr ? nullptr : fused_weight + begin, end - begin,
                       out + begin);
      begin = end;
    }
    if (plan_.round_before_weight) {
      round_row(plan_.dtype, out, size);
      if (weight != nullptr) multiply_row(out, weight, size);
    }
    if (bias_ != nullptr) add_row(out, bias_ + head * plan_.bias.head_stride, size);
  }

  void scale(int64_t batch, int64_t head, int64_t position, C* scratch, C* out) const {
    const StridedInput& by = plan_.scale;
    const int64_t index = batch * by.stride[0] + head * by.stride[1] + position * by.stride[2];
    const void* row = element(by.data, by.dtype, index);
    const int64_t count = by.stride[3] == 0 ? 1 : plan_.head_size;
    read_row(by.dtype, row, count, scratch);
    if (count == 1) {
      multiply_row(out, scratch[0], plan_.head_size);
    } else {
      multiply_row(out, scratch, count);
    }
  }

  void take_hidden_statistics(Runtime& runtime) {
    const int64_t tokens = plan_.batch * plan_.length;
    const int64_t width = plan_.num_heads * plan_.head_size;
    hidden_ = static_cast<NormStatistics*>(
        runtime.allocate(static_cast<size_t>(tokens * plan_.groups) * sizeof(NormStatistics)));
    if (hidden_ == nullptr) return;
    constexpr int64_t kTokensPerTask = 16;
    parallel(runtime, ceil_div(tokens, kTokensPerTask), [&](int64_t task) {
      Borrowed<C> row(runtime, width + scratch_size());
      if (row.data() == nullptr) return;
      const int64_t end = smaller((task + 1) * kTokensPerTask, tokens);
      for (int64_t token = task * kTokensPerTask; token < end; ++token) {
        token_statistics(token, row.data(), row.data() + width);
      }
    });
  }

  void token_statistics(int64_t token, C* row, C* scratch) {
    const int64_t batch = token / plan_.length;
    const int64_t position = token % plan_.length;
    const int64_t width = plan_.num_heads * plan_.head_size;
    read_row(plan_.dtype, source(batch, 0, position), width, row);
    for (int64_t head = 0; plan_.rotary.order == spec::RotaryOrder::kBeforeNorm && head < plan_.num_heads; ++head) {
      rotate_row(plan_.rotary, batch, head, position, scratch, row + head * plan_.head_size);
    }
    const int64_t group = width / plan_.groups;
    for (int64_t i = 0; i < plan_.groups; ++i) {
      hidden_[token * plan_.groups + i] = norm_statistics(plan_, row + i * group, group);
    }
  }

  const PreparationPlan& plan_;
  const C* weight_ = nullptr;
  const C* bias_ = nullptr;
  NormStatistics* hidden_ = nullptr;
};

}  // namespace QKNORM_ISA
}  // namespace qknorm
