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
    return !normalises(plan_.kind) && !rotates(plan_.rotary.order) && plan_.scale.dtype == QKNORM_ABSENT;
  }

  const PreparationPlan& plan() const { return plan_; }

  const void* source(int64_t batch, int64_t head, int64_t position) const {
    const int64_t row = (batch * plan_.length + position) * plan_.num_heads + head;
    return element(plan_.x, plan_.dtype, row * plan_.head_size);
  }

  // Rows of consecutive positions, `stride` apart in `rows`. The statistics of several rows come first: each is a chain
  // of operations that wait for each other, and only those of different rows can run side by side.
  void prepare_rows(int64_t batch, int64_t head, int64_t first, int64_t count, C factor, C* scratch, C* rows,
                    int64_t stride) const {
    constexpr int64_t kAtOnce = 8;
    const bool in_place = reads_in_place();
    const bool takes_statistics = has_one_statistic();
    for (int64_t done = 0; done < count; done += kAtOnce) {
      NormStatistics statistics[kAtOnce];
      const int64_t end = smaller(count, done + kAtOnce);
      for (int64_t r = done; r < end; ++r) {
        C* out = rows + r * stride;
        if (!in_place) read_and_rotate(batch, head, first + r, scratch, out);
        const C* x = in_place ? row_in_place(batch, head, first + r) : out;
        if (takes_statistics) statistics[r - done] = norm_statistics(plan_, x, plan_.head_size);
      }
      for (int64_t r = done; r < end; ++r) {
        C* out = rows + r * stride;
        const C* x = in_place ? row_in_place(batch, head, first + r) : out;
        finish(batch, head, first + r, factor, statistics[r - done], x, scratch, out);
      }
    }
  }

  // One row, head_size values times `factor`.
  void prepare_row(int64_t batch, int64_t head, int64_t position, C factor, C* scratch, C* out) const {
    prepare_rows(batch, head, position, 1, factor, scratch, out, plan_.head_size);
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

  // Whether the norm's input is the row as it lies in memory.
  bool reads_in_place() const {
    return normalises(plan_.kind) && !rotates_before_norm(plan_.rotary.order) && plan_.dtype == dtype_of<C>();
  }

  // Whether a row has one pair of statistics of its own.
  bool has_one_statistic() const { return normalises(plan_.kind) && !plan_.hidden_axis && plan_.groups == 1; }

  const C* row_in_place(int64_t batch, int64_t head, int64_t position) const {
    return static_cast<const C*>(source(batch, head, position));
  }

  // The norm's input where it is not in place.
  void read_and_rotate(int64_t batch, int64_t head, int64_t position, C* scratch, C* out) const {
    read_row(plan_.dtype, source(batch, head, position), plan_.head_size, out);
    if (rotates_before_norm(plan_.rotary.order)) {
      rotate_row(plan_.rotary, batch, head, position, scratch, out);
    }
  }

  // From the norm on; `known` holds the statistics where has_one_statistic(). `x` may be `out`.
  void finish(int64_t batch, int64_t head, int64_t position, C factor, const NormStatistics& known, const C* x,
              C* scratch, C* out) const {
    const int64_t size = plan_.head_size;
    if (one_scale()) factor *= scale_at(batch, head, position);
    const bool in_one_pass = is_common() && normalise_and_rotate(batch, head, position, factor, known, x, scratch, out);
    if (in_one_pass) factor = 1;
    if (!in_one_pass && normalises(plan_.kind)) {
      // All that follows is linear: the factors can go into the norm's own.
      const bool folded = !plan_.round_before_weight;
      normalise(batch, head, position, folded ? factor : C(1), has_one_statistic() ? &known : nullptr, x, out);
      if (folded) factor = 1;
    }
    if (!in_one_pass && rotates_after_norm(plan_.rotary.order)) {
      rotate_row(plan_.rotary, batch, head, position, scratch, out);
    }
    if (plan_.scale.dtype != QKNORM_ABSENT && !one_scale()) scale(batch, head, position, scratch, out);
    if (factor != C(1)) multiply_row(out, factor, size);
  }

  // The usual form: one group, then the rotary over the whole row in two halves.
  bool is_common() const {
    const RotaryPlan& rotary = plan_.rotary;
    return normalises(plan_.kind) && plan_.groups == 1 && !plan_.round_before_weight &&
           rotates_after_norm(rotary.order) && !rotary.interleaved && rotary.sections == 1 &&
           rotary.size == plan_.head_size && plan_.head_size % (2 * kLanes<C>) == 0;
  }

  // Norm and rotary without writing the row in between; false where the norm's factor is out of range.
  bool normalise_and_rotate(int64_t batch, int64_t head, int64_t position, C factor, const NormStatistics& known,
                            const C* x, C* scratch, C* out) const {
    const NormStatistics& statistics = plan_.hidden_axis ? hidden_[batch * plan_.length + position] : known;
    const double product = statistics.factor * static_cast<double>(factor);
    if (!(__builtin_fabs(product) < kFactorLimit<C>)) return false;
    const RotaryPlan& rotary = plan_.rotary;
    const int64_t width = rotary.table_width;
    const int64_t half = plan_.head_size / 2;
    const int64_t to_second = width == rotary.size ? half : 0;
    const C* cos = table_row(rotary.cos, width, batch, head, position, scratch);
    const C* sin = table_row(rotary.sin, width, batch, head, position, scratch + width);
    const C* weight = weight_ == nullptr ? nullptr : weight_ + head * plan_.weight.head_stride;
    const C* bias = bias_ == nullptr ? nullptr : bias_ + head * plan_.bias.head_stride;
    const Vector<C> means = broadcast(static_cast<C>(statistics.mean));
    const Vector<C> factors = broadcast(static_cast<C>(product));
    const Vector<C> bias_factors = broadcast(factor);
    const auto normalised = [&](int64_t i) {
      Vector<C> value = (load(x + i) - means) * factors;
      if (weight != nullptr) value *= load(weight + i);
      if (bias != nullptr) value += load(bias + i) * bias_factors;
      return value;
    };
    for (int64_t i = 0; i < half; i += kLanes<C>) {
      const Vector<C> low = normalised(i);
      const Vector<C> high = normalised(half + i);
      store(out + i, low * load(cos + i) - high * load(sin + i));
      store(out + half + i, high * load(cos + to_second + i) + low * load(sin + to_second + i));
    }
    return true;
  }

  void normalise(int64_t batch, int64_t head, int64_t position, C factor, const NormStatistics* known, const C* x,
                 C* out) const {
    const int64_t size = plan_.head_size;
    const C* weight = weight_ == nullptr ? nullptr : weight_ + head * plan_.weight.head_stride;
    const C* bias = bias_ == nullptr ? nullptr : bias_ + head * plan_.bias.head_stride;
    const C* fused_weight = plan_.round_before_weight ? nullptr : weight;
    const C* fused_bias = plan_.round_before_weight ? nullptr : bias;
    if (known != nullptr) {
      apply(*known, factor, fused_weight, fused_bias, 0, size, x, out);
    } else {
      apply_groups(batch, head, position, factor, fused_weight, fused_bias, x, out);
    }
    if (plan_.round_before_weight) {
      round_row(plan_.dtype, out, size);
      if (weight != nullptr) multiply_row(out, weight, size);
      if (bias != nullptr) add_row(out, bias, size);
    }
  }

  // Values [begin, end) of a row.
  void apply(NormStatistics statistics, C factor, const C* weight, const C* bias, int64_t begin, int64_t end,
             const C* x, C* out) const {
    statistics.factor *= static_cast<double>(factor);
    apply_statistics(statistics, x + begin, weight == nullptr ? nullptr : weight + begin,
                     bias == nullptr ? nullptr : bias + begin, factor, end - begin, out + begin);
  }

  // Each group with statistics of its own; a group of a hidden norm may begin and end inside a head.
  void apply_groups(int64_t batch, int64_t head, int64_t position, C factor, const C* weight, const C* bias, const C* x,
                    C* out) const {
    const int64_t size = plan_.head_size;
    const int64_t group = (plan_.hidden_axis ? size * plan_.num_heads : size) / plan_.groups;
    const int64_t token = batch * plan_.length + position;
    const int64_t first = plan_.hidden_axis ? head * size : 0;
    int64_t begin = 0;
    while (begin < size) {
      const int64_t index = (first + begin) / group;
      const int64_t end = smaller((index + 1) * group - first, size);
      apply(plan_.hidden_axis ? hidden_[token * plan_.groups + index] : norm_statistics(plan_, x + begin, end - begin),
            factor, weight, bias, begin, end, x, out);
      begin = end;
    }
  }

  // Whether one number scales a whole row.
  bool one_scale() const { return plan_.scale.dtype != QKNORM_ABSENT && plan_.scale.stride[3] == 0; }

  int64_t scale_index(int64_t batch, int64_t head, int64_t position) const {
    return batch * plan_.scale.stride[0] + head * plan_.scale.stride[1] + position * plan_.scale.stride[2];
  }

  C scale_at(int64_t batch, int64_t head, int64_t position) const {
    C scale;
    read_row(plan_.scale.dtype, element(plan_.scale.data, plan_.scale.dtype, scale_index(batch, head, position)), 1,
             &scale);
    return scale;
  }

  void scale(int64_t batch, int64_t head, int64_t position, C* scratch, C* out) const {
    const StridedInput& by = plan_.scale;
    read_row(by.dtype, element(by.data, by.dtype, scale_index(batch, head, position)), plan_.head_size, scratch);
    multiply_row(out, scratch, plan_.head_size);
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
    const C* x = row;
    if (reads_in_place()) {
      x = static_cast<const C*>(source(batch, 0, position));
    } else {
      read_row(plan_.dtype, source(batch, 0, position), width, row);
    }
    for (int64_t head = 0; rotates_before_norm(plan_.rotary.order) && head < plan_.num_heads; ++head) {
      rotate_row(plan_.rotary, batch, head, position, scratch, row + head * plan_.head_size);
    }
    const int64_t group = width / plan_.groups;
    for (int64_t i = 0; i < plan_.groups; ++i) {
      hidden_[token * plan_.groups + i] = norm_statistics(plan_, x + i * group, group);
    }
  }

  const PreparationPlan& plan_;
  const C* weight_ = nullptr;
  const C* bias_ = nullptr;
  NormStatistics* hidden_ = nullptr;
};

}  // namespace QKNORM_ISA
}  // namespace qknorm
