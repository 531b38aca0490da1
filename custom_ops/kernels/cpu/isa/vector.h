// The one place that knows the width of a register: vectors of float and double in the compiler's own extension
// (gcc >= 12, clang), so the same code compiles to AVX-512, AVX2 and, with 16-byte vectors, to any other processor.
//
// QKNORM_ISA names the namespace; this file and all that include it are compiled once for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#define QKNORM_INLINE inline __attribute__((always_inline))

namespace qknorm {
namespace QKNORM_ISA {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__) && defined(__FMA__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

template <class C>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float Type __attribute__((vector_size(kVectorBytes)));
  typedef float Unaligned __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
  typedef int32_t Bits __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VectorOf<double> {
  typedef double Type __attribute__((vector_size(kVectorBytes)));
  typedef double Unaligned __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
  typedef int64_t Bits __attribute__((vector_size(kVectorBytes)));
};

template <class C>
using Vector = typename VectorOf<C>::Type;
template <class C>
using VectorBits = typename VectorOf<C>::Bits;

// Lanes of a vector of C.
template <class C>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(C));

template <class C>
QKNORM_INLINE Vector<C> load(const C* from) {
  return *reinterpret_cast<const typename VectorOf<C>::Unaligned*>(from);
}

template <class C>
QKNORM_INLINE void store(C* to, Vector<C> value) {
  *reinterpret_cast<typename VectorOf<C>::Unaligned*>(to) = value;
}

template <class C>
QKNORM_INLINE Vector<C> broadcast(C value) {
  return value - Vector<C>{};
}

template <class C>
QKNORM_INLINE Vector<C> larger(Vector<C> a, Vector<C> b) {
  return a < b ? b : a;  // a NaN in `a` stays
}

template <class C>
QKNORM_INLINE C larger(C a, C b) {
  return a < b ? b : a;
}

template <class C>
QKNORM_INLINE C smaller(C a, C b) {
  return b < a ? b : a;
}

QKNORM_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
QKNORM_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Each lane with the one `Step` lanes away.
template <class C, int Step, size_t... J>
QKNORM_INLINE Vector<C> swap_lanes(Vector<C> v, std::index_sequence<J...>) {
  return __builtin_shufflevector(v, v, static_cast<int>(J ^ Step)...);
}

template <class C, int Step = kLanes<C> / 2>
QKNORM_INLINE C sum_lanes(Vector<C> v) {
  if constexpr (Step == 0) {
    return v[0];
  } else {
    return sum_lanes<C, Step / 2>(v + swap_lanes<C, Step>(v, std::make_index_sequence<kLanes<C>>()));
  }
}

template <class C, int Step = kLanes<C> / 2>
QKNORM_INLINE C largest_lane(Vector<C> v) {
  if constexpr (Step == 0) {
    return v[0];
  } else {
    return largest_lane<C, Step / 2>(larger<C>(v, swap_lanes<C, Step>(v, std::make_index_sequence<kLanes<C>>())));
  }
}

// One step of a transpose: swaps the off-diagonal blocks of size `Step` of the rows a and b, which lie `Step` apart.
template <class C, int Step, size_t... J>
QKNORM_INLINE void swap_blocks(Vector<C>& a, Vector<C>& b, std::index_sequence<J...>) {
  constexpr int n = kLanes<C>;
  const Vector<C> low =
      __builtin_shufflevector(a, b, (J & Step ? static_cast<int>(J) - Step + n : static_cast<int>(J))...);
  const Vector<C> high =
      __builtin_shufflevector(a, b, (J & Step ? static_cast<int>(J) + n : static_cast<int>(J) + Step)...);
  a = low;
  b = high;
}

template <class C, int Step>
QKNORM_INLINE void transpose_steps(Vector<C>* rows) {
  if constexpr (Step > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<C>; ++i) {
      if ((i & Step) == 0) swap_blocks<C, Step>(rows[i], rows[i + Step], std::make_index_sequence<kLanes<C>>());
    }
    transpose_steps<C, Step / 2>(rows);
  }
}

// Transposes a square of kLanes rows in registers.
template <class C>
QKNORM_INLINE void transpose(Vector<C>* rows) {
  transpose_steps<C, kLanes<C> / 2>(rows);
}

}  // namespace QKNORM_ISA
}  // namespace qknorm
