// A few query rows against a tile of key and value rows that are read once, as they lie in memory: the inner work of
// decoding, which is bound by memory.
#pragma once

#include "kernels/cpu/isa/logits_stage.h"

namespace qknorm {
namespace QKNORM_ISA {

inline constexpr int64_t kDecodeTileKeys = 64;
inline constexpr int kKeysAtOnce = 4;
// Distance of the software prefetch; without it the same loop reaches half the bandwidth.
inline constexpr int64_t kPrefetchBytes = 4096;

// Rows of one pair, `stride` elements apart.
template <class T>
struct Rows {
  const T* data;
  int64_t stride;
  const T* row(int64_t index) const { return data + index * stride; }
};

template <class T, int Keys>
QKNORM_INLINE void prefetch_ahead(const Rows<T>& rows, int64_t key, int64_t size) {
  const int64_t bytes = size * static_cast<int64_t>(sizeof(T));
  const int64_t ahead = kPrefetchBytes / (rows.stride * static_cast<int64_t>(sizeof(T))) + 1;
  for (int k = 0; k < Keys; ++k) {
    // Behind the end of the buffer no pointer may point, but an address may be fetched.
    const uintptr_t from = reinterpret_cast<uintptr_t>(rows.row(key + k)) + static_cast<uintptr_t>(ahead * rows.stride) * sizeof(T);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(reinterpret_cast<const void*>(from + static_cast<uintptr_t>(i)));
  }
}

// out[row * out_stride + k] = query row . key k, for Keys keys and QueryRows rows.
template <class C, class T, int Keys, int QueryRows>
QKNORM_INLINE void dot_products(const C* queries, const Rows<T>& keys, int64_t key, int64_t size, C* out,
                                int64_t out_stride) {
  Vector<C> sums[Keys][QueryRows] = {};
  int64_t i = 0;
  for (; i + kLanes<C> <= size; i += kLanes<C>) {
    Vector<C> query[QueryRows];
    for (int r = 0; r < QueryRows; ++r) query[r] = load(queries + r * size + i);
    for (int k = 0; k < Keys; ++k) {
      const Vector<C> values = load_wide<C, T>(keys.row(key + k) + i);
      for (int r = 0; r < QueryRows; ++r) sums[k][r] += values * query[r];
    }
  }
  for (int k = 0; k < Keys; ++k) {
    for (int r = 0; r < QueryRows; ++r) {
      C total = sum_lanes<C>(sums[k][r]);
      for (int64_t j = i; j < size; ++j) total += static_cast<C>(widen(keys.row(key + k)[j])) * queries[r * size + j];
      out[r * out_stride + k] = total;
    }
  }
}

template <class C, class T, int Keys>
QKNORM_INLINE void score_keys(const C* queries, int64_t rows, const Rows<T>& keys, int64_t key, int64_t size, C* out) {
  prefetch_ahead<T, Keys>(keys, key, size);
  int64_t r = 0;
  for (; r + 2 <= rows; r += 2) {
    dot_products<C, T, Keys, 2>(queries + r * size, keys, key, size, out + r * kDecodeTileKeys, kDecodeTileKeys);
  }
  if (r < rows) {
    dot_products<C, T, Keys, 1>(queries + r * size, keys, key, size, out + r * kDecodeTileKeys, kDecodeTileKeys);
  }
}

// scores[row * kDecodeTileKeys + i] = query row . key (first + i).
template <class C, class T>
void score_rows(const C* queries, int64_t rows, const Rows<T>& keys, int64_t first, int64_t count, int64_t size,
                C* scores) {
  int64_t key = 0;
  for (; key + kKeysAtOnce <= count; key += kKeysAtOnce) {
    score_keys<C, T, kKeysAtOnce>(queries, rows, keys, first + key, size, scores + key);
  }
  for (; key < count; ++key) score_keys<C, T, 1>(queries, rows, keys, first + key, size, scores + key);
}

// output row += sum over k of weights[row * kDecodeTileKeys + k] * value k.
template <class C, class T, int Keys, int QueryRows>
QKNORM_INLINE void add_weighted(const C* weights, const Rows<T>& values, int64_t key, int64_t size, C* output) {
  Vector<C> w[QueryRows][Keys];
  for (int r = 0; r < QueryRows; ++r) {
    for (int k = 0; k < Keys; ++k) w[r][k] = broadcast(weights[r * kDecodeTileKeys + k]);
  }
  int64_t i = 0;
  for (; i + kLanes<C> <= size; i += kLanes<C>) {
    Vector<C> sums[QueryRows];
    for (int r = 0; r < QueryRows; ++r) sums[r] = load(output + r * size + i);
    for (int k = 0; k < Keys; ++k) {
      const Vector<C> value = load_wide<C, T>(values.row(key + k) + i);
      for (int r = 0; r < QueryRows; ++r) sums[r] += w[r][k] * value;
    }
    for (int r = 0; r < QueryRows; ++r) store(output + r * size + i, sums[r]);
  }
  for (; i < size; ++i) {
    for (int r = 0; r < QueryRows; ++r) {
      for (int k = 0; k < Keys; ++k) {
        output[r * size + i] += weights[r * kDecodeTileKeys + k] * static_cast<C>(widen(values.row(key + k)[i]));
      }
    }
  }
}

template <class C, class T, int Keys>
QKNORM_INLINE void weigh_keys(const C* weights, int64_t rows, const Rows<T>& values, int64_t key, int64_t size,
                              C* outputs) {
  prefetch_ahead<T, Keys>(values, key, size);
  int64_t r = 0;
  for (; r + 2 <= rows; r += 2) {
    add_weighted<C, T, Keys, 2>(weights + r * kDecodeTileKeys, values, key, size, outputs + r * size);
  }
  if (r < rows) add_weighted<C, T, Keys, 1>(weights + r * kDecodeTileKeys, values, key, size, outputs + r * size);
}

template <class C, class T>
void weigh_rows(const C* weights, int64_t rows, const Rows<T>& values, int64_t first, int64_t count, int64_t size,
                C* outputs) {
  int64_t key = 0;
  for (; key + kKeysAtOnce <= count; key += kKeysAtOnce) {
    weigh_keys<C, T, kKeysAtOnce>(weights + key, rows, values, first + key, size, outputs);
  }
  for (; key < count; ++key) weigh_keys<C, T, 1>(weights + key, rows, values, first + key, size, outputs);
}

// Online softmax of one row over a tile: weights in place of `count` logits (room for kDecodeTileKeys), outputs rescaled.
template <class C>
QKNORM_INLINE void softmax_row(bool natural, C* logits, int64_t count, C* maximum, C* sum, C* output, int64_t size) {
  const C factor = natural ? static_cast<C>(kLog2E) : C(1);
  const C lowest = -static_cast<C>(__builtin_inf());
  const int64_t padded = round_up(count, kLanes<C>);
  for (int64_t i = count; i < padded; ++i) logits[i] = lowest;
  Vector<C> largest = broadcast(*maximum);
  for (int64_t i = 0; i < padded; i += kLanes<C>) largest = larger<C>(largest, load(logits + i));
  const C new_maximum = largest_lane<C>(largest);
  const C reference = new_maximum == lowest ? C(0) : new_maximum;
  const C rescale = exp2(broadcast((*maximum - reference) * factor))[0];
  Vector<C> sums = {};
  for (int64_t i = 0; i < padded; i += kLanes<C>) {
    const Vector<C> weight = exp2((load(logits + i) - reference) * factor);
    store(logits + i, weight);
    sums += weight;
  }
  *sum = *sum * rescale + sum_lanes<C>(sums);
  *maximum = new_maximum;
  if (rescale != C(1)) {
    for (int64_t i = 0; i < size; ++i) output[i] *= rescale;
  }
}

}  // namespace QKNORM_ISA
}  // namespace qknorm
