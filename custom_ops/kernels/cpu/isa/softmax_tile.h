// The online softmax of one strip over one tile of keys. P is stored [key][lane = row], so that nothing is horizontal.
#pragma once

#include "kernels/cpu/isa/micro_kernel.h"
#include "kernels/cpu/isa/vector_math.h"

namespace qknorm {
namespace QKNORM_ISA {

// Running maximum, sum and last rescaling factor of the rows of a strip.
template <class C>
struct StripState {
  Vector<C> maximum;
  Vector<C> sum;
  Vector<C> rescale;
  Vector<C> tile_maximum;
};

// Turns the logits p[key][lane], keys [begin, end), into weights. With `Natural` the logits are to base e, else base 2.
template <class C, bool Natural>
QKNORM_INLINE void softmax_tile(StripState<C>& state, C* p, int64_t begin, int64_t end) {
  constexpr C factor = Natural ? static_cast<C>(kLog2E) : C(1);
  const C lowest = -static_cast<C>(__builtin_inf());
  const Vector<C> maximum = larger<C>(state.maximum, state.tile_maximum);
  // A row that has seen nothing keeps -inf; its weights are 2^(-inf - 0) = 0.
  const Vector<C> reference = maximum == lowest ? Vector<C>{} : maximum;
  const Vector<C> rescale = exp2((state.maximum - reference) * factor);
  Vector<C> sum0 = {};
  Vector<C> sum1 = {};
  int64_t key = begin;
  for (; key + 2 <= end; key += 2) {
    const Vector<C> w0 = exp2((load(p + key * kLanes<C>) - reference) * factor);
    const Vector<C> w1 = exp2((load(p + (key + 1) * kLanes<C>) - reference) * factor);
    store(p + key * kLanes<C>, w0);
    store(p + (key + 1) * kLanes<C>, w1);
    sum0 += w0;
    sum1 += w1;
  }
  for (; key < end; ++key) {
    const Vector<C> w = exp2((load(p + key * kLanes<C>) - reference) * factor);
    store(p + key * kLanes<C>, w);
    sum0 += w;
  }
  state.maximum = maximum;
  state.rescale = rescale;
  state.sum = state.sum * rescale + (sum0 + sum1);
}

}  // namespace QKNORM_ISA
}  // namespace qknorm
