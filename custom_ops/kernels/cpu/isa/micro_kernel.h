// The matrix product of a strip of rows with a panel of columns, all operands packed: the only place where time is
// spent.
#pragma once

#include "kernels/cpu/isa/vector.h"

namespace qknorm {
namespace QKNORM_ISA {

// A strip holds kRows rows; in memory a column of a strip is one vector (kRows <= kLanes), its spare lanes zero. A
// panel holds kColumns columns, two vectors. The kRows x 2 sums fill the register file.
template <class C>
struct Tile {
  static constexpr int kColumns = 2 * kLanes<C>;
  static constexpr int kRows = kVectorBytes == 64 ? (kLanes<C> == 16 ? 12 : 8) : (kLanes<C> == 8 ? 6 : kLanes<C>);
};

template <class C>
struct TileSums {
  Vector<C> row[Tile<C>::kRows][2];
};

// sums[r][j] += sum over i < depth of a[i * AStep + r] * b[i * kColumns + j].
template <class C, int AStep>
QKNORM_INLINE void multiply_add(int64_t depth, const C* a, const C* b, TileSums<C>& sums) {
  constexpr int rows = Tile<C>::kRows;
  TileSums<C> local = sums;
  for (int64_t i = 0; i < depth; ++i) {
    const Vector<C> b0 = load(b);
    const Vector<C> b1 = load(b + kLanes<C>);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const Vector<C> value = broadcast(a[r]);
      local.row[r][0] += value * b0;
      local.row[r][1] += value * b1;
    }
    a += AStep;
    b += Tile<C>::kColumns;
  }
  sums = local;
}

// Fetches `lines` cache lines that another strip or panel will need.
QKNORM_INLINE void prefetch_lines(const void* from, int64_t lines) {
  for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(static_cast<const char*>(from) + 64 * i);
}

}  // namespace QKNORM_ISA
}  // namespace qknorm
