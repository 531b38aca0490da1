// From dot products to logits: clamp, soft cap, bias or boolean mask, on one row of consecutive keys.
#pragma once

#include "kernels/cpu/isa/storage.h"
#include "kernels/cpu/isa/vector_math.h"
#include "kernels/cpu/problem.h"

namespace qknorm {
namespace QKNORM_ISA {

template <class C>
class LogitsStage {
 public:
  explicit LogitsStage(const AttentionProblem& p)
      : bias_(p.bias),
        clamp_(static_cast<C>(p.logit_clamp)),
        softcap_(static_cast<C>(p.softcap)),
        plain_(p.bias.dtype == QKNORM_ABSENT && p.logit_clamp == 0 && p.softcap == 0),
        q_factor_(static_cast<C>(plain_ ? p.scale * kLog2E : p.scale)) {}

  // Whether a logit is just a dot product. Then q carries log2(e) and the softmax takes 2^x, else it takes e^x: a bias
  // of the most negative float must not be multiplied beyond it.
  bool plain() const { return plain_; }

  // What q is multiplied by.
  C q_factor() const { return q_factor_; }

  bool has_bias() const { return bias_.dtype != QKNORM_ABSENT; }

  // Dot products after the clamp and the soft cap.
  Vector<C> bounded(Vector<C> x) const {
    if (clamp_ > 0) {
      x = x > clamp_ ? broadcast(clamp_) : x;
      x = x < -clamp_ ? broadcast(-clamp_) : x;
    }
    return softcap_ > 0 ? softcap_ * tanh(x / softcap_) : x;
  }

  // Logits with what read_bias() gave; a hidden NaN is hidden.
  Vector<C> biased(Vector<C> x, Vector<C> bias) const {
    const Vector<C> sum = x + bias;
    return bias_.dtype == QKNORM_BOOL ? (bias < 0 ? bias : sum) : sum;
  }

  // The bias of keys [first_key, first_key + count); of a boolean mask 0 or -inf.
  void read_bias(int64_t batch, int64_t head, int64_t query, int64_t first_key, int64_t count, C* row) const {
    const int64_t step = bias_.stride[3];
    const int64_t index = batch * bias_.stride[0] + head * bias_.stride[1] + query * bias_.stride[2] + first_key * step;
    const void* from = element(bias_.data, bias_.dtype, index);
    if (bias_.dtype == QKNORM_BOOL) {
      const auto* seen = static_cast<const uint8_t*>(from);
      const C unseen = -static_cast<C>(__builtin_inf());
      for (int64_t i = 0; i < count; ++i) row[i] = seen[i * step] != 0 ? C(0) : unseen;
    } else if (step == 1) {
      read_row(bias_.dtype, from, count, row);
    } else {
      for (int64_t i = 0; i < count; ++i) read_row(bias_.dtype, element(from, bias_.dtype, i * step), 1, row + i);
    }
  }

  // Logits of keys [first_key, first_key + count) from the dot products in `row`, which has room for whole vectors;
  // those behind the last key are garbage.
  void apply(int64_t batch, int64_t head, int64_t query, int64_t first_key, int64_t count, C* row) const {
    constexpr int64_t kChunk = 64;
    C values[kChunk] = {};
    for (int64_t done = 0; done < count; done += kChunk) {
      const int64_t part = smaller(count - done, kChunk);
      if (has_bias()) read_bias(batch, head, query, first_key + done, part, values);
      for (int64_t i = 0; i < part; i += kLanes<C>) {
        const Vector<C> x = bounded(load(row + done + i));
        store(row + done + i, has_bias() ? biased(x, load(values + i)) : x);
      }
    }
  }

 private:
  StridedInput bias_;
  C clamp_;
  C softcap_;
  bool plain_;
  C q_factor_;
};

// The sink of a head, in the base that the logits have.
template <class C>
QKNORM_INLINE C sink_logit(const AttentionProblem& p, const LogitsStage<C>& logits, int64_t head) {
  C sink;
  read_row(p.sink.dtype, element(p.sink.data, p.sink.dtype, head * p.sink.stride[0]), 1, &sink);
  return logits.plain() ? sink * static_cast<C>(kLog2E) : sink;
}

}  // namespace QKNORM_ISA
}  // namespace qknorm
