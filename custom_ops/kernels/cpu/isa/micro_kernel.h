// The matrix product of a panel of rows with a strip of columns, both packed: the only place where time is spent.
#pragma once

#include <type_traits>

#include "kernels/cpu/isa/vector.h"

namespace qknorm {
namespace QKNORM_ISA {

// Query rows are the columns of both products, so that a lane belongs to one query from its logits to its output and
// nothing in between is horizontal: logits are keys times queries, outputs are values (columns) times weights.
//
// A strip holds kColumns queries, two vectors. A panel holds kRows keys, or kRows columns of the values. The kRows x 2
// sums fill the register file.
template <class C>
struct Tile {
  static constexpr int kVectors = 2;
  static constexpr int kColumns = kVectors * kLanes<C>;
  static constexpr int kRows = kVectorBytes == 64 ? (kLanes<C> == 16 ? 12 : 8) : (kLanes<C> == 8 ? 6 : kLanes<C>);
  // The last panel may have fewer rows: a multiple of this.
  static constexpr int kRowStep = kRows % 3 == 0 ? kRows / 3 : kRows / 2;
  // Keys whose logits of one strip are held at a time: whole panels, and those of a prompt of 128 tokens.
  static constexpr int64_t kKeys = kRows % 3 == 0 ? 132 : 128;
};

// Some of the columns of a strip: `Vectors` vectors from the first that `b` and `out` point to.
template <class C, int Rows, int Vectors>
struct TileSums {
  Vector<C> row[Rows][Vectors];
};

// sums[r][j] += sum over i < depth of a[i * kRows + r] * b[i * kColumns + j].
template <class C, int Rows, int Vectors>
QKNORM_INLINE void multiply_add(int64_t depth, const C* a, const C* b, TileSums<C, Rows, Vectors>& sums) {
  TileSums<C, Rows, Vectors> local = sums;
  for (int64_t i = 0; i < depth; ++i) {
    Vector<C> columns[Vectors];
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) columns[j] = load(b + j * kLanes<C>);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Vector<C> value = broadcast(a[r]);
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) local.row[r][j] += value * columns[j];
    }
    a += Tile<C>::kRows;
    b += Tile<C>::kColumns;
  }
  sums = local;
}

// Terms of a logit that are added in one chain: with every further one the error grows. Heads up to this size have one.
inline constexpr int64_t kLongestChain = 128;

// out[r] = the product of whole chains, each summed on its own.
template <class C, int Rows, int Vectors>
__attribute__((noinline)) void score_chains(int64_t depth, const C* a, const C* b, C* out) {
  for (int64_t done = 0; done < depth; done += kLongestChain) {
    TileSums<C, Rows, Vectors> sums = {};
    multiply_add<C, Rows, Vectors>(kLongestChain, a + done * Tile<C>::kRows, b + done * Tile<C>::kColumns, sums);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) {
        C* at = out + r * Tile<C>::kColumns + j * kLanes<C>;
        store(at, done > 0 ? load(at) + sums.row[r][j] : sums.row[r][j]);
      }
    }
  }
}

// out[r] = the product, and the largest of each column into `maximum`.
template <class C, int Rows, int Vectors>
void score_panel(int64_t depth, const C* a, const C* b, C* out, Vector<C>* maximum) {
  const int64_t before = (depth - 1) / kLongestChain * kLongestChain;
  if (before > 0) score_chains<C, Rows, Vectors>(before, a, b, out);
  TileSums<C, Rows, Vectors> sums = {};
  multiply_add<C, Rows, Vectors>(depth - before, a + before * Tile<C>::kRows, b + before * Tile<C>::kColumns, sums);
  if (before > 0) {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) sums.row[r][j] += load(out + r * Tile<C>::kColumns + j * kLanes<C>);
    }
  }
#pragma GCC unroll 2
  for (int j = 0; j < Vectors; ++j) {
    Vector<C> largest = maximum[j];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      largest = larger<C>(largest, sums.row[r][j]);
      store(out + r * Tile<C>::kColumns + j * kLanes<C>, sums.row[r][j]);
    }
    maximum[j] = largest;
  }
}

// out[r] = out[r] * rescale + the product, which is summed on its own first: a sum over all keys in one chain would
// lose more digits.
template <class C, int Rows, int Vectors>
void accumulate_panel(int64_t depth, const C* a, const C* b, C* out, const Vector<C>* rescale) {
  TileSums<C, Rows, Vectors> sums = {};
  multiply_add<C, Rows, Vectors>(depth, a, b, sums);
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; ++j) {
      C* at = out + r * Tile<C>::kColumns + j * kLanes<C>;
      store(at, load(at) * rescale[j] + sums.row[r][j]);
    }
  }
}

// Calls body(integral constant Rows) with the smallest number of rows that a panel of `rows` rows can be computed with.
template <class C, class Body>
QKNORM_INLINE void with_rows(int64_t rows, const Body& body) {
  constexpr int step = Tile<C>::kRowStep;
  if (Tile<C>::kRows == 3 * step && rows <= step) {
    body(std::integral_constant<int, step>());
  } else if (rows <= Tile<C>::kRows - step) {
    body(std::integral_constant<int, Tile<C>::kRows - step>());
  } else {
    body(std::integral_constant<int, Tile<C>::kRows>());
  }
}

}  // namespace QKNORM_ISA
}  // namespace qknorm
