// Values in memory (float32, float64, float16, bfloat16) to and from the type that is computed in.
#pragma once

#include "kernels/cpu/isa/vector.h"
#include "qknorm/qk_norm_params.h"

namespace qknorm {
namespace QKNORM_ISA {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <class To, class From>
QKNORM_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

QKNORM_INLINE float widen(float x) { return x; }
QKNORM_INLINE double widen(double x) { return x; }
QKNORM_INLINE float widen(BFloat16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
QKNORM_INLINE float widen(Half x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1fu;
  const uint32_t fraction = x.bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 31 ? 255u : exponent + 112u;
  return bit_cast<float>(sign | (wide << 23) | (fraction << 13));
#endif
}

template <class T, class C>
QKNORM_INLINE T narrow(C x);
template <>
QKNORM_INLINE float narrow<float, float>(float x) {
  return x;
}
template <>
QKNORM_INLINE float narrow<float, double>(double x) {
  return static_cast<float>(x);
}
template <>
QKNORM_INLINE double narrow<double, double>(double x) {
  return x;
}
template <>
QKNORM_INLINE BFloat16 narrow<BFloat16, float>(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  if (x != x) return BFloat16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return BFloat16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
QKNORM_INLINE Half narrow<Half, float>(float x) {
#if defined(__F16C__)
  return Half{static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
#else
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return Half{static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return Half{static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 lets the processor round to multiples of 2^-24
    const float rounded = bit_cast<float>(magnitude) + 0.5f;
    return Half{static_cast<uint16_t>(sign | (bit_cast<uint32_t>(rounded) - 0x3f000000u))};
  }
  return Half{static_cast<uint16_t>(sign | ((magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13))};
#endif
}
template <>
QKNORM_INLINE BFloat16 narrow<BFloat16, double>(double x) {
  return narrow<BFloat16, float>(static_cast<float>(x));
}
template <>
QKNORM_INLINE Half narrow<Half, double>(double x) {
  return narrow<Half, float>(static_cast<float>(x));
}

// A vector of C from kLanes<C> stored values.
template <class C, class T>
QKNORM_INLINE Vector<C> load_wide(const T* from) {
  if constexpr (sizeof(T) == sizeof(C)) {
    return load<C>(reinterpret_cast<const C*>(from));
  } else {
    C lanes[kLanes<C>];
    for (int i = 0; i < kLanes<C>; ++i) lanes[i] = static_cast<C>(widen(from[i]));
    return load<C>(lanes);
  }
}

#if defined(__AVX512F__) && defined(__AVX512BW__)
template <>
QKNORM_INLINE Vector<float> load_wide<float, Half>(const Half* from) {
  return Vector<float>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
template <>
QKNORM_INLINE Vector<float> load_wide<float, BFloat16>(const BFloat16* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return Vector<float>(_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));
}
#elif defined(__AVX2__) && defined(__F16C__)
template <>
QKNORM_INLINE Vector<float> load_wide<float, Half>(const Half* from) {
  return Vector<float>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
template <>
QKNORM_INLINE Vector<float> load_wide<float, BFloat16>(const BFloat16* from) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return Vector<float>(_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
}
#endif

template <class C, class T>
QKNORM_INLINE void widen_row(const T* from, int64_t count, C* to) {
  int64_t i = 0;
  for (; i + kLanes<C> <= count; i += kLanes<C>) store(to + i, load_wide<C, T>(from + i));
  for (; i < count; ++i) to[i] = static_cast<C>(widen(from[i]));
}

template <class C, class T>
QKNORM_INLINE void narrow_row(const C* from, int64_t count, T* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = narrow<T, C>(from[i]);
}

#if defined(__F16C__)
// The conversion of one value is an instruction of its own, which the compiler does not vectorise.
template <>
QKNORM_INLINE void narrow_row<float, Half>(const float* from, int64_t count, Half* to) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  for (; i < count; ++i) to[i] = narrow<Half, float>(from[i]);
}
#endif

QKNORM_INLINE int64_t storage_size(int32_t dtype) {
  switch (dtype) {
    case QKNORM_BOOL:
      return 1;
    case QKNORM_FLOAT16:
    case QKNORM_BFLOAT16:
      return 2;
    case QKNORM_FLOAT:
      return 4;
    default:
      return 8;
  }
}

QKNORM_INLINE const void* element(const void* data, int32_t dtype, int64_t index) {
  return static_cast<const char*>(data) + index * storage_size(dtype);
}
QKNORM_INLINE void* element(void* data, int32_t dtype, int64_t index) {
  return static_cast<char*>(data) + index * storage_size(dtype);
}

// `count` values of a floating type, as C.
template <class C>
void read_row(int32_t dtype, const void* from, int64_t count, C* to) {
  switch (dtype) {
    case QKNORM_FLOAT:
      return widen_row(static_cast<const float*>(from), count, to);
    case QKNORM_FLOAT16:
      return widen_row(static_cast<const Half*>(from), count, to);
    case QKNORM_BFLOAT16:
      return widen_row(static_cast<const BFloat16*>(from), count, to);
    default:
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<C>(static_cast<const double*>(from)[i]);
  }
}

template <class C>
void write_row(int32_t dtype, const C* from, int64_t count, void* to) {
  switch (dtype) {
    case QKNORM_FLOAT:
      return narrow_row(from, count, static_cast<float*>(to));
    case QKNORM_FLOAT16:
      return narrow_row(from, count, static_cast<Half*>(to));
    case QKNORM_BFLOAT16:
      return narrow_row(from, count, static_cast<BFloat16*>(to));
    default:
      for (int64_t i = 0; i < count; ++i) static_cast<double*>(to)[i] = static_cast<double>(from[i]);
  }
}

// Rounds a row to a narrower type and back, where a model casts in between.
template <class C>
void round_row(int32_t dtype, C* row, int64_t count) {
  if (dtype == QKNORM_FLOAT16) {
    for (int64_t i = 0; i < count; ++i) row[i] = static_cast<C>(widen(narrow<Half, C>(row[i])));
  } else if (dtype == QKNORM_BFLOAT16) {
    for (int64_t i = 0; i < count; ++i) row[i] = static_cast<C>(widen(narrow<BFloat16, C>(row[i])));
  }
}

}  // namespace QKNORM_ISA
}  // namespace qknorm
