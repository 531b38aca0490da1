// A few query rows against a tile of key and value rows that are read once, as they lie in memory: the inner work of
// decoding, which is bound by memory.
#pragma once

#include "kernels/cpu/isa/logits_stage.h"

namespace qknorm {
namespace QKNORM_ISA {

// Keys of a tile at most; scores of one query row lie this far apart.
inline constexpr int64_t kDecodeTileKeys = 256;

// How rows are read. From memory: one after the other, one stream for the hardware prefetcher, and small tiles. From a
// cache: two at a time, which loads queries half as often, and large tiles.
enum class ReadFrom { kMemory, kCache };

// Keys and values of a call of at most this many bytes are taken to be in the last-level cache since the last token.
inline constexpr int64_t kCachedBytes = int64_t{24} << 20;

// Keys of a tile. A longer one has fewer ends; from memory they cost nothing. With vectors of less than 64 bytes,
// values take several passes (weigh_chunks), each of which starts its stream anew: narrow rows stay in a cache
// meanwhile.
template <class C, class T, ReadFrom From>
constexpr int64_t tile_keys() {
  if (kVectorBytes < 64) return sizeof(T) < sizeof(C) ? kDecodeTileKeys : 64;
  return From == ReadFrom::kCache ? 128 : 64;
}

// Rows of one pair, `stride` elements apart.
template <class T>
struct Rows {
  const T* data;
  int64_t stride;
  const T* row(int64_t index) const { return data + index * stride; }
};

// Rows are read one after the other, each from its beginning to its end: one stream, which the processor's own
// prefetcher follows. What is done for each key on top of its loads is kept small: sums of several keys are reduced
// together, and outputs stay in registers.

// Whether fetching far ahead helps: measured, rows of float32 come 7% faster from memory, those of half the size 20%
// slower.
template <class C, class T>
inline constexpr bool kFetchAhead = sizeof(T) == sizeof(C);

// Brings the row that lies kAheadBytes behind `row` into the second-level cache. It may lie behind the end of the
// buffer: it is fetched, not read.
inline constexpr uintptr_t kAheadBytes = 12288;

template <class T>
QKNORM_INLINE void fetch_ahead(const T* row, int64_t size) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(row) + kAheadBytes;
  const auto bytes = static_cast<uintptr_t>(size) * sizeof(T);
  for (uintptr_t i = 0; i < bytes; i += 64) __builtin_prefetch(reinterpret_cast<const void*>(address + i), 0, 2);
}

// Touches the row `to_next` bytes from `row`, which is read after this tile: keys and values take turns, and where one
// begins the processor would wait for the address of the page and for the prefetcher to see the stream.
template <class C, class T>
QKNORM_INLINE void touch_next(const T* row, intptr_t to_next) {
  constexpr int locality = sizeof(T) == sizeof(C) ? 3 : 2;  // measured: first-level cache, second-level cache
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<intptr_t>(row) + to_next), 0, locality);
}
inline constexpr int64_t kRowsPerTouch = 8;

// In bytes; `to` is not read.
QKNORM_INLINE intptr_t distance(const void* from, const void* to) {
  return reinterpret_cast<intptr_t>(to) - reinterpret_cast<intptr_t>(from);
}

// One step of the sum of kLanes vectors: blocks of size `Step` of a and b, which stand `Step` apart.
template <class C, int Step>
QKNORM_INLINE void add_blocks(Vector<C>* sums) {
  if constexpr (Step > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < Step; ++i) {
      Vector<C> other = sums[i + Step];
      swap_blocks<C, Step>(sums[i], other, std::make_index_sequence<kLanes<C>>());
      sums[i] += other;
    }
    add_blocks<C, Step / 2>(sums);
  }
}

// A vector whose lane i is the sum of the lanes of sums[i].
template <class C>
QKNORM_INLINE Vector<C> sum_each(Vector<C>* sums) {
  add_blocks<C, kLanes<C> / 2>(sums);
  return sums[0];
}

// scores[row * kDecodeTileKeys + k] = query row . key k, for QueryRows rows and as many keys as fill a vector.
template <class C, class T, ReadFrom From, int QueryRows>
QKNORM_INLINE void score_keys(const C* queries, const Rows<T>& keys, int64_t key, int64_t size, intptr_t to_next,
                              C* scores) {
  constexpr int lanes = kLanes<C>;
  constexpr int num_keys = lanes / QueryRows;
  constexpr int at_once = From == ReadFrom::kCache && num_keys > 1 ? 2 : 1;
  Vector<C> sums[lanes];
  touch_next<C>(keys.row(key), to_next);
#pragma GCC unroll 16
  for (int k = 0; k < num_keys; k += at_once) {
    const T* row = keys.row(key + k);
#pragma GCC unroll 2
    for (int n = 0; n < at_once; ++n) {
      if constexpr (kFetchAhead<C, T>) fetch_ahead(row + n * keys.stride, size);
    }
    Vector<C> local[QueryRows * at_once] = {};
#pragma GCC unroll 2
    for (int64_t i = 0; i + lanes <= size; i += lanes) {
      Vector<C> query[QueryRows];
#pragma GCC unroll 2
      for (int r = 0; r < QueryRows; ++r) query[r] = load(queries + r * size + i);
#pragma GCC unroll 2
      for (int n = 0; n < at_once; ++n) {
        const Vector<C> values = load_wide<C, T>(row + n * keys.stride + i);
#pragma GCC unroll 2
        for (int r = 0; r < QueryRows; ++r) local[r * at_once + n] += values * query[r];
      }
    }
#pragma GCC unroll 2
    for (int r = 0; r < QueryRows; ++r) {
#pragma GCC unroll 2
      for (int n = 0; n < at_once; ++n) sums[r * num_keys + k + n] = local[r * at_once + n];
    }
  }
  const Vector<C> result = sum_each<C>(sums);
#pragma GCC unroll 2
  for (int r = 0; r < QueryRows; ++r) {
    __builtin_memcpy(scores + r * kDecodeTileKeys, reinterpret_cast<const C*>(&result) + r * num_keys,
                     num_keys * sizeof(C));
  }
}

// The same for one key.
template <class C, class T>
QKNORM_INLINE C score_key(const C* query, const T* key, int64_t size) {
  Vector<C> sums = {};
  for (int64_t i = 0; i + kLanes<C> <= size; i += kLanes<C>) sums += load_wide<C, T>(key + i) * load(query + i);
  return sum_lanes<C>(sums);
}

template <class C, class T, ReadFrom From, int QueryRows>
void score_query_rows(const C* queries, const Rows<T>& keys, int64_t first, int64_t count, int64_t size,
                      intptr_t to_next, C* scores) {
  constexpr int num_keys = kLanes<C> / QueryRows;
  int64_t key = 0;
  for (; key + num_keys <= count; key += num_keys) {
    score_keys<C, T, From, QueryRows>(queries, keys, first + key, size, to_next, scores + key);
  }
  for (; key < count; ++key) {
    for (int r = 0; r < QueryRows; ++r) {
      scores[r * kDecodeTileKeys + key] = score_key<C, T>(queries + r * size, keys.row(first + key), size);
    }
  }
  const int64_t vectors = size / kLanes<C> * kLanes<C>;
  for (key = 0; vectors < size && key < count; ++key) {
    const T* row = keys.row(first + key);
    for (int r = 0; r < QueryRows; ++r) {
      for (int64_t i = vectors; i < size; ++i) {
        scores[r * kDecodeTileKeys + key] += static_cast<C>(widen(row[i])) * queries[r * size + i];
      }
    }
  }
}

// scores[row * kDecodeTileKeys + i] = query row . key (first + i). The first rows bring the keys into the cache, the
// others find them there.
template <class C, class T, ReadFrom From>
void score_rows(const C* queries, int64_t rows, const Rows<T>& keys, int64_t first, int64_t count, int64_t size,
                intptr_t to_next, C* scores) {
  int64_t r = 0;
  for (; r + 2 <= rows; r += 2) {
    score_query_rows<C, T, From, 2>(queries + r * size, keys, first, count, size, to_next,
                                    scores + r * kDecodeTileKeys);
  }
  if (r < rows)
    score_query_rows<C, T, From, 1>(queries + r * size, keys, first, count, size, to_next,
                                    scores + r * kDecodeTileKeys);
}

// Vectors of each of two outputs that stay in registers over a tile.
inline constexpr int kOutputVectors = kVectorBytes == 64 ? 8 : 4;

// outputs row += sum over k of weights[row * kDecodeTileKeys + k] * value k, for `Vectors` vectors of columns. The
// first of several passes fetches the `fetched` values of a whole row, so that memory sees one stream; it is 0 in the
// others.
template <class C, class T, int QueryRows, int Vectors>
QKNORM_INLINE void weigh_columns(const C* weights, const T* values, int64_t stride, int64_t count, int64_t size,
                                 int64_t fetched, intptr_t to_next, C* outputs) {
  Vector<C> sums[QueryRows][Vectors] = {};
  for (int64_t k = 0; k < count; ++k) {
    Vector<C> weight[QueryRows];
#pragma GCC unroll 2
    for (int r = 0; r < QueryRows; ++r) weight[r] = broadcast(weights[r * kDecodeTileKeys + k]);
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) {
      const Vector<C> value = load_wide<C, T>(values + j * kLanes<C>);
#pragma GCC unroll 2
      for (int r = 0; r < QueryRows; ++r) sums[r][j] += weight[r] * value;
    }
    for (int64_t i = Vectors * kLanes<C>; i < fetched; i += 64 / static_cast<int64_t>(sizeof(T))) {
      __builtin_prefetch(values + i);
    }
    if constexpr (kFetchAhead<C, T>) fetch_ahead(values, fetched);
    if (fetched > 0 && k % kRowsPerTouch == 0) touch_next<C>(values, to_next);
    values += stride;
  }
#pragma GCC unroll 2
  for (int r = 0; r < QueryRows; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) {
      C* at = outputs + r * size + j * kLanes<C>;
      store(at, load(at) + sums[r][j]);
    }
  }
}

// Columns from `column` on in chunks of `Vectors` vectors, then in smaller ones.
template <class C, class T, int QueryRows, int Vectors>
QKNORM_INLINE void weigh_chunks(const C* weights, const Rows<T>& values, int64_t first, int64_t count, int64_t size,
                                int64_t column, intptr_t to_next, C* outputs) {
  for (; column + Vectors * kLanes<C> <= size; column += Vectors * kLanes<C>) {
    const int64_t fetched = column == 0 ? size : 0;
    weigh_columns<C, T, QueryRows, Vectors>(weights, values.row(first) + column, values.stride, count, size, fetched,
                                            to_next, outputs + column);
  }
  if constexpr (Vectors > 1) {
    weigh_chunks<C, T, QueryRows, Vectors / 2>(weights, values, first, count, size, column, to_next, outputs);
  } else {
    for (int64_t k = 0; column < size && k < count; ++k) {
      const T* row = values.row(first + k);
      for (int r = 0; r < QueryRows; ++r) {
        const C weight = weights[r * kDecodeTileKeys + k];
        for (int64_t i = column; i < size; ++i) outputs[r * size + i] += weight * static_cast<C>(widen(row[i]));
      }
    }
  }
}

// outputs row += sum over i of weights[row * kDecodeTileKeys + i] * value (first + i).
template <class C, class T>
void weigh_rows(const C* weights, int64_t rows, const Rows<T>& values, int64_t first, int64_t count, int64_t size,
                intptr_t to_next, C* outputs) {
  int64_t r = 0;
  for (; r + 2 <= rows; r += 2) {
    weigh_chunks<C, T, 2, kOutputVectors>(weights + r * kDecodeTileKeys, values, first, count, size, 0, to_next,
                                          outputs + r * size);
  }
  if (r < rows) {
    weigh_chunks<C, T, 1, kOutputVectors>(weights + r * kDecodeTileKeys, values, first, count, size, 0, to_next,
                                          outputs + r * size);
  }
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
