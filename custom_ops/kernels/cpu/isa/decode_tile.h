// A few query rows against a tile of key and value rows that are read once, as they lie in memory: the inner work of
// decoding, which is bound by memory.
#pragma once

#include <type_traits>

#include "kernels/cpu/isa/logits_stage.h"

namespace qknorm {
namespace QKNORM_ISA {

inline constexpr int64_t kDecodeTileKeys = 64;

// Rows of one pair, `stride` elements apart.
template <class T>
struct Rows {
  const T* data;
  int64_t stride;
  const T* row(int64_t index) const { return data + index * stride; }
};

// How rows are walked through. One at a time is a single stream, which the processor's own prefetcher follows at nearly
// the full bandwidth; four at a time need less arithmetic, but where they lie more than 1 KB apart in total the
// prefetcher loses track (measured: a third of the bandwidth) unless software fetches ahead, evenly spread.
enum class Walk { kSingle, kFour, kFourAndFetch };

QKNORM_INLINE Walk choose_walk(int64_t query_rows, int64_t row_bytes, bool contiguous) {
  constexpr int64_t kNear = 256;
  if (row_bytes <= kNear) return Walk::kFour;
  if (query_rows <= 2) return Walk::kSingle;
  return contiguous ? Walk::kFourAndFetch : Walk::kFour;
}

// Distance of the software prefetch.
inline constexpr int64_t kAheadBytes = 2048;

// Fetches what lies kAheadBytes behind the part of `Keys` rows that one step of a loop reads; called once for each
// step.
template <class T, int Keys, int Lanes>
class Fetcher {
 public:
  // Behind the end of the buffer no pointer may point, but an address may be fetched.
  explicit Fetcher(const T* from) : address_(reinterpret_cast<uintptr_t>(from) + kAheadBytes) {}

  QKNORM_INLINE void step() {
    constexpr int bytes = Keys * Lanes * static_cast<int>(sizeof(T));
#pragma GCC unroll 8
    for (int i = 0; i < bytes; i += 64)
      __builtin_prefetch(reinterpret_cast<const void*>(address_ + static_cast<uintptr_t>(i)));
    address_ += bytes;
  }

 private:
  uintptr_t address_;
};

// out[row * kDecodeTileKeys + k] = query row . key k, for Keys keys and QueryRows rows.
template <class C, class T, int Keys, int QueryRows, bool Fetch>
QKNORM_INLINE void dot_products(const C* queries, const Rows<T>& keys, int64_t key, int64_t size, C* out) {
  Vector<C> sums[Keys][QueryRows];
#pragma GCC unroll 4
  for (int k = 0; k < Keys; ++k) {
#pragma GCC unroll 4
    for (int r = 0; r < QueryRows; ++r) sums[k][r] = Vector<C>{};
  }
  Fetcher<T, Keys, kLanes<C>> fetcher(keys.row(key));
  int64_t i = 0;
  for (; i + kLanes<C> <= size; i += kLanes<C>) {
    if constexpr (Fetch) fetcher.step();
    Vector<C> query[QueryRows];
#pragma GCC unroll 4
    for (int r = 0; r < QueryRows; ++r) query[r] = load(queries + r * size + i);
#pragma GCC unroll 4
    for (int k = 0; k < Keys; ++k) {
      const Vector<C> values = load_wide<C, T>(keys.row(key + k) + i);
#pragma GCC unroll 4
      for (int r = 0; r < QueryRows; ++r) sums[k][r] += values * query[r];
    }
  }
#pragma GCC unroll 4
  for (int k = 0; k < Keys; ++k) {
#pragma GCC unroll 4
    for (int r = 0; r < QueryRows; ++r) out[r * kDecodeTileKeys + k] = sum_lanes<C>(sums[k][r]);
  }
  for (; i < size; ++i) {
    for (int k = 0; k < Keys; ++k) {
      const C value = static_cast<C>(widen(keys.row(key + k)[i]));
      for (int r = 0; r < QueryRows; ++r) out[r * kDecodeTileKeys + k] += value * queries[r * size + i];
    }
  }
}

// The first pair of rows brings the keys into the cache, the others find them there.
template <class C, class T, int Keys, bool Fetch>
QKNORM_INLINE void score_keys(const C* queries, int64_t rows, const Rows<T>& keys, int64_t key, int64_t size, C* out) {
  int64_t r = 0;
  if (rows >= 2) {
    dot_products<C, T, Keys, 2, Fetch>(queries, keys, key, size, out);
    for (r = 2; r + 2 <= rows; r += 2) {
      dot_products<C, T, Keys, 2, false>(queries + r * size, keys, key, size, out + r * kDecodeTileKeys);
    }
  }
  if (r < rows) dot_products<C, T, Keys, 1, false>(queries + r * size, keys, key, size, out + r * kDecodeTileKeys);
}

// output row += sum over k of weights[row * kDecodeTileKeys + k] * value k.
template <class C, class T, int Keys, int QueryRows, bool Fetch>
QKNORM_INLINE void add_weighted(const C* weights, const Rows<T>& values, int64_t key, int64_t size, C* output) {
  Vector<C> w[QueryRows][Keys];
#pragma GCC unroll 4
  for (int r = 0; r < QueryRows; ++r) {
#pragma GCC unroll 4
    for (int k = 0; k < Keys; ++k) w[r][k] = broadcast(weights[r * kDecodeTileKeys + k]);
  }
  Fetcher<T, Keys, kLanes<C>> fetcher(values.row(key));
  int64_t i = 0;
  for (; i + kLanes<C> <= size; i += kLanes<C>) {
    if constexpr (Fetch) fetcher.step();
    Vector<C> sums[QueryRows];
#pragma GCC unroll 4
    for (int r = 0; r < QueryRows; ++r) sums[r] = load(output + r * size + i);
#pragma GCC unroll 4
    for (int k = 0; k < Keys; ++k) {
      const Vector<C> value = load_wide<C, T>(values.row(key + k) + i);
#pragma GCC unroll 4
      for (int r = 0; r < QueryRows; ++r) sums[r] += w[r][k] * value;
    }
#pragma GCC unroll 4
    for (int r = 0; r < QueryRows; ++r) store(output + r * size + i, sums[r]);
  }
  for (; i < size; ++i) {
    for (int k = 0; k < Keys; ++k) {
      const C value = static_cast<C>(widen(values.row(key + k)[i]));
      for (int r = 0; r < QueryRows; ++r) output[r * size + i] += weights[r * kDecodeTileKeys + k] * value;
    }
  }
}

template <class C, class T, int Keys, bool Fetch>
QKNORM_INLINE void weigh_keys(const C* weights, int64_t rows, const Rows<T>& values, int64_t key, int64_t size,
                              C* outputs) {
  int64_t r = 0;
  if (rows >= 2) {
    add_weighted<C, T, Keys, 2, Fetch>(weights, values, key, size, outputs);
    for (r = 2; r + 2 <= rows; r += 2) {
      add_weighted<C, T, Keys, 2, false>(weights + r * kDecodeTileKeys, values, key, size, outputs + r * size);
    }
  }
  if (r < rows) {
    add_weighted<C, T, Keys, 1, false>(weights + r * kDecodeTileKeys, values, key, size, outputs + r * size);
  }
}

// Calls body(integral constant keys, fetch, index of the first key) over [0, count).
template <class Body>
QKNORM_INLINE void walk_keys(Walk walk, int64_t count, const Body& body) {
  using One = std::integral_constant<int, 1>;
  using Four = std::integral_constant<int, 4>;
  int64_t key = 0;
  if (walk == Walk::kFour) {
    for (; key + 4 <= count; key += 4) body(Four(), std::false_type(), key);
  } else if (walk == Walk::kFourAndFetch) {
    for (; key + 4 <= count; key += 4) body(Four(), std::true_type(), key);
  }
  for (; key < count; ++key) body(One(), std::false_type(), key);
}

// scores[row * kDecodeTileKeys + i] = query row . key (first + i).
template <class C, class T>
void score_rows(const C* queries, int64_t rows, const Rows<T>& keys, int64_t first, int64_t count, int64_t size,
                C* scores) {
  const Walk walk = choose_walk(rows, size * static_cast<int64_t>(sizeof(T)), keys.stride == size);
  walk_keys(walk, count, [&](auto at_once, auto fetch, int64_t key) {
    score_keys<C, T, at_once.value, fetch.value>(queries, rows, keys, first + key, size, scores + key);
  });
}

// outputs row += sum over i of weights[row * kDecodeTileKeys + i] * value (first + i).
template <class C, class T>
void weigh_rows(const C* weights, int64_t rows, const Rows<T>& values, int64_t first, int64_t count, int64_t size,
                C* outputs) {
  const Walk walk = choose_walk(rows, size * static_cast<int64_t>(sizeof(T)), values.stride == size);
  walk_keys(walk, count, [&](auto at_once, auto fetch, int64_t key) {
    weigh_keys<C, T, at_once.value, fetch.value>(weights + key, rows, values, first + key, size, outputs);
  });
}

// Online softmax of one row over a tile: weights in place of `count` logits (room for kDecodeTileKeys), outputs
// rescaled.
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
