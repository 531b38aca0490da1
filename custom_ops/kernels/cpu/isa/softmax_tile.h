// The online softmax of one strip over one tile of keys. Weights are stored [key][lane = query], so that nothing is
// horizontal.
#pragma once

#include "kernels/cpu/isa/micro_kernel.h"
#include "kernels/cpu/isa/vector_math.h"

namespace qknorm {
namespace QKNORM_ISA {

// Running maximum, sum and last rescaling factor of the queries of a strip.
template <class C>
struct StripState {
  Vector<C> maximum[2];
  Vector<C> sum[2];
  Vector<C> rescale[2];
  Vector<C> tile_maximum[2];
};

// Turns the logits p[key][lane] of the strip's vectors [first, first + Vectors), keys [begin, end), into weights. With
// `Natural` the logits are to base e, else base 2.
template <class C, int Vectors, bool Natural>
void softmax_tile(StripState<C>& state, int first, C* p, int64_t begin, int64_t end) {
  constexpr C factor = Natural ? static_cast<C>(kLog2E) : C(1);
  constexpr int columns = Tile<C>::kColumns;
  const C lowest = -static_cast<C>(__builtin_inf());
  Vector<C> reference[Vectors];
  Vector<C> sums[Vectors][2] = {};
#pragma GCC unroll 2
  for (int j = 0; j < Vectors; ++j) {
    const Vector<C> before = state.maximum[first + j];
    const Vector<C> maximum = larger<C>(before, state.tile_maximum[first + j]);
    // A query that has seen nothing keeps -inf; its weights are 2^(-inf - 0) = 0.
    reference[j] = maximum == lowest ? Vector<C>{} : maximum;
    state.rescale[first + j] = exp2((before - reference[j]) * factor);
    state.maximum[first + j] = maximum;
  }
  p += first * kLanes<C>;
  int64_t key = begin;
  for (; key + 2 <= end; key += 2) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) {
        C* at = p + (key + i) * columns + j * kLanes<C>;
        const Vector<C> weight = exp2((load(at) - reference[j]) * factor);
        store(at, weight);
        sums[j][i] += weight;
      }
    }
  }
  if (key < end) {
    for (int j = 0; j < Vectors; ++j) {
      C* at = p + key * columns + j * kLanes<C>;
      const Vector<C> weight = exp2((load(at) - reference[j]) * factor);
      store(at, weight);
      sums[j][0] += weight;
    }
  }
#pragma GCC unroll 2
  for (int j = 0; j < Vectors; ++j) {
    state.sum[first + j] = state.sum[first + j] * state.rescale[first + j] + (sums[j][0] + sums[j][1]);
  }
}

}  // namespace QKNORM_ISA
}  // namespace qknorm
