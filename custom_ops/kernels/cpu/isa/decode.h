// Attention of one or a few queries over a long cache: the keys are split into chunks, so that all threads work at
// batch 1, each cache row is read once for all the heads that share it, and partial results are merged at the end.
#pragma once

#include "kernels/cpu/isa/decode_tile.h"
#include "kernels/cpu/isa/preparation.h"
#include "kernels/cpu/isa/visibility.h"

namespace qknorm {
namespace QKNORM_ISA {

// Whether reading rows as they are beats packing them for the micro-kernel.
QKNORM_INLINE bool is_decode(const AttentionProblem& p) {
  const int64_t rows = p.num_queries * (p.q_heads / p.kv_heads);
  return p.num_queries == 1 || (p.num_queries <= 4 && rows <= 16);
}

template <class C, class T>
class Decode {
 public:
  Decode(const AttentionProblem& problem, Runtime& runtime, const Preparation<C>& queries, const Preparation<C>& keys)
      : p_(problem),
        runtime_(runtime),
        queries_(queries),
        keys_(keys),
        logits_(problem),
        rows_(p_.num_queries * (p_.q_heads / p_.kv_heads)),
        pairs_(p_.batch * p_.kv_heads) {
    // A buffer that is copied is walked to its end, one in place as far as it is filled.
    const bool copied = is_copied(p_.past_key, p_.present_key) || is_copied(p_.past_value, p_.present_value);
    const int64_t walked = copied ? p_.total_rows : p_.longest_row;
    const int64_t per_task = ceil_div(walked * pairs_, 4 * runtime.threads());
    chunk_keys_ = round_up(smaller(larger(per_task, kSmallestChunk), kLargestChunk), kDecodeTileKeys);
    chunks_ = larger(ceil_div(walked, chunk_keys_), int64_t{1});
  }

  void run() {
    prepared_queries_ = allocate<C>(runtime_, pairs_ * rows_ * p_.head_size);
    partials_ = allocate<C>(runtime_, pairs_ * chunks_ * partial_size());
    if (!keys_.is_identity()) prepared_keys_ = allocate<C>(runtime_, pairs_ * p_.num_new_keys * p_.head_size);
    if (runtime_.failed()) return;
    prepare_queries();
    prepare_new_entries();
    if (runtime_.failed()) return;
    parallel(runtime_, pairs_ * chunks_, [&](int64_t task) { run_chunk(task / chunks_, task % chunks_); });
    if (!runtime_.failed()) merge();
  }

 private:
  static constexpr int64_t kSmallestChunk = 256;
  static constexpr int64_t kLargestChunk = 2048;
  static constexpr int64_t kRowsPerTask = 16;

  static bool is_copied(const void* past, const void* present) {
    return past != nullptr && present != nullptr && past != present;
  }

  bool is_cached() const {
    const int64_t row_bytes = (p_.head_size + p_.value_size) * static_cast<int64_t>(sizeof(T));
    return pairs_ * p_.longest_row * row_bytes <= kCachedBytes;
  }

  // Of one chunk: maximum and sum of each row, then the rows' outputs.
  int64_t partial_size() const { return rows_ * (2 + p_.value_size); }

  int64_t head_of(int64_t pair, int64_t row) const {
    return pair % p_.kv_heads * (p_.q_heads / p_.kv_heads) + row / p_.num_queries;
  }

  void prepare_queries() {
    parallel(runtime_, ceil_div(pairs_ * rows_, kRowsPerTask), [&](int64_t task) {
      Borrowed<C> scratch(runtime_, queries_.scratch_size());
      if (scratch.data() == nullptr) return;
      const int64_t end = smaller((task + 1) * kRowsPerTask, pairs_ * rows_);
      for (int64_t i = task * kRowsPerTask; i < end; ++i) {
        queries_.prepare_row(i / rows_ / p_.kv_heads, head_of(i / rows_, i % rows_), i % rows_ % p_.num_queries,
                             logits_.q_factor(), scratch.data(), prepared_queries_ + i * p_.head_size);
      }
    });
  }

  // New keys and values, to scratch memory and to the present buffers.
  void prepare_new_entries() {
    const int64_t entries = pairs_ * p_.num_new_keys;
    if (prepared_keys_ == nullptr && p_.present_key == nullptr && p_.present_value == nullptr) return;
    parallel(runtime_, ceil_div(entries, kRowsPerTask), [&](int64_t task) {
      Borrowed<C> scratch(runtime_, keys_.scratch_size() + p_.head_size);
      if (scratch.data() == nullptr) return;
      const int64_t end = smaller((task + 1) * kRowsPerTask, entries);
      for (int64_t i = task * kRowsPerTask; i < end; ++i) {
        prepare_new_entry(i / p_.num_new_keys, i % p_.num_new_keys, scratch.data());
      }
    });
  }

  void prepare_new_entry(int64_t pair, int64_t index, C* scratch) {
    const int64_t batch = pair / p_.kv_heads;
    const int64_t present_row = pair * p_.total_rows + past_length(p_, batch) + index;
    C* key = scratch + keys_.scratch_size();
    if (prepared_keys_ != nullptr) key = prepared_keys_ + (pair * p_.num_new_keys + index) * p_.head_size;
    keys_.prepare_row(batch, pair % p_.kv_heads, index, C(1), scratch, key);
    if (p_.present_key != nullptr) {
      write_row(p_.dtype, key, p_.head_size, static_cast<T*>(p_.present_key) + present_row * p_.head_size);
    }
    if (p_.present_value != nullptr) {
      __builtin_memcpy(static_cast<T*>(p_.present_value) + present_row * p_.value_size, new_values(pair).row(index),
                       static_cast<size_t>(p_.value_size) * sizeof(T));
    }
  }

  Rows<T> new_values(int64_t pair) const {
    const int64_t first = pair / p_.kv_heads * p_.num_new_keys * p_.kv_heads + pair % p_.kv_heads;
    return {static_cast<const T*>(p_.value) + first * p_.value_size, p_.kv_heads * p_.value_size};
  }

  Rows<T> new_keys(int64_t pair) const {
    const int64_t first = pair / p_.kv_heads * p_.num_new_keys * p_.kv_heads + pair % p_.kv_heads;
    return {static_cast<const T*>(p_.key.x) + first * p_.head_size, p_.kv_heads * p_.head_size};
  }

  void run_chunk(int64_t pair, int64_t chunk) {
    C* partial = partials_ + (pair * chunks_ + chunk) * partial_size();
    C* outputs = partial + 2 * rows_;
    for (int64_t r = 0; r < rows_; ++r) {
      partial[r] = -static_cast<C>(__builtin_inf());
      partial[rows_ + r] = 0;
    }
    for (int64_t i = 0; i < rows_ * p_.value_size; ++i) outputs[i] = 0;
    Borrowed<C> scores(runtime_, rows_ * kDecodeTileKeys);
    if (scores.data() == nullptr) return;

    const int64_t batch = pair / p_.kv_heads;
    const int64_t past = past_length(p_, batch);
    const KeyRange seen = visible_range(p_, batch, 0, p_.num_queries);
    const int64_t begin = chunk * chunk_keys_;
    const int64_t end = begin + chunk_keys_;
    copy_past(pair, begin, smaller(end, p_.past_rows));
    const int64_t first = larger(begin, seen.begin);
    const int64_t old_end = smaller(smaller(end, seen.end), past);
    const Rows<T> old_keys = {static_cast<const T*>(p_.past_key) + pair * p_.past_rows * p_.head_size, p_.head_size};
    const Rows<T> old_values = {static_cast<const T*>(p_.past_value) + pair * p_.past_rows * p_.value_size,
                                p_.value_size};
    if (is_cached()) {
      run_keys<ReadFrom::kCache>(pair, old_keys, old_values, 0, {first, old_end}, scores.data(), partial);
    } else {
      run_keys<ReadFrom::kMemory>(pair, old_keys, old_values, 0, {first, old_end}, scores.data(), partial);
    }
    const KeyRange fresh = {larger(first, past), smaller(end, seen.end)};
    if (prepared_keys_ != nullptr) {
      const Rows<C> prepared = {prepared_keys_ + pair * p_.num_new_keys * p_.head_size, p_.head_size};
      run_keys<ReadFrom::kCache>(pair, prepared, new_values(pair), past, fresh, scores.data(), partial);
    } else {
      run_keys<ReadFrom::kCache>(pair, new_keys(pair), new_values(pair), past, fresh, scores.data(), partial);
    }
  }

  // Rows [begin, end) of past buffers that are not the present ones; the new entries are already in place.
  void copy_past(int64_t pair, int64_t begin, int64_t end) const {
    const int64_t past = past_length(p_, pair / p_.kv_heads);
    copy_rows(p_.past_key, p_.present_key, pair, p_.head_size, begin, smaller(end, past));
    copy_rows(p_.past_value, p_.present_value, pair, p_.value_size, begin, smaller(end, past));
    copy_rows(p_.past_key, p_.present_key, pair, p_.head_size, larger(begin, past + p_.num_new_keys), end);
    copy_rows(p_.past_value, p_.present_value, pair, p_.value_size, larger(begin, past + p_.num_new_keys), end);
  }

  void copy_rows(const void* past, void* present, int64_t pair, int64_t size, int64_t begin, int64_t end) const {
    if (!is_copied(past, present) || begin >= end) return;
    __builtin_memcpy(static_cast<T*>(present) + (pair * p_.total_rows + begin) * size,
                     static_cast<const T*>(past) + (pair * p_.past_rows + begin) * size,
                     static_cast<size_t>((end - begin) * size) * sizeof(T));
  }

  // Keys of `range`, counted as positions; key `origin` is row 0 of both.
  template <ReadFrom From, class K>
  void run_keys(int64_t pair, const Rows<K>& keys, const Rows<T>& values, int64_t origin, KeyRange range, C* scores,
                C* partial) const {
    const C* queries = prepared_queries_ + pair * rows_ * p_.head_size;
    C* outputs = partial + 2 * rows_;
    constexpr int64_t tile = tile_keys<C, T, From>();
    for (int64_t key = range.begin; key < range.end; key += tile) {
      const int64_t count = smaller(tile, range.end - key);
      const K* key_row = keys.row(key - origin);
      const T* value_row = values.row(key - origin);
      score_rows<C, K, From>(queries, rows_, keys, key - origin, count, p_.head_size, distance(key_row, value_row),
                             scores);
      for (int64_t r = 0; r < rows_; ++r) {
        C* row = scores + r * kDecodeTileKeys;
        if (!logits_.plain()) {
          logits_.apply(pair / p_.kv_heads, head_of(pair, r), r % p_.num_queries, key, count, row);
        }
        if (p_.num_queries > 1) hide_keys(pair, r, key, count, row);
        softmax_row(!logits_.plain(), row, count, partial + r, partial + rows_ + r, outputs + r * p_.value_size,
                    p_.value_size);
      }
      weigh_rows(scores, rows_, values, key - origin, count, p_.value_size,
                 distance(value_row, key_row) + tile * keys.stride * static_cast<int64_t>(sizeof(K)), outputs);
    }
  }

  // A single query sees all keys of its range; of several, each has a range of its own.
  void hide_keys(int64_t pair, int64_t row, int64_t first, int64_t count, C* logits) const {
    const KeyRange seen = visible_range(p_, pair / p_.kv_heads, row % p_.num_queries);
    for (int64_t i = 0; i < count; ++i) {
      if (first + i < seen.begin || first + i >= seen.end) logits[i] = -static_cast<C>(__builtin_inf());
    }
  }

  void merge() {
    parallel(runtime_, ceil_div(pairs_ * rows_, kRowsPerTask), [&](int64_t task) {
      Borrowed<C> output(runtime_, p_.value_size);
      if (output.data() == nullptr) return;
      const int64_t end = smaller((task + 1) * kRowsPerTask, pairs_ * rows_);
      for (int64_t i = task * kRowsPerTask; i < end; ++i) merge_row(i / rows_, i % rows_, output.data());
    });
  }

  void merge_row(int64_t pair, int64_t row, C* output) const {
    const int64_t size = p_.value_size;
    const C* first = partials_ + pair * chunks_ * partial_size();
    const C factor = logits_.plain() ? C(1) : static_cast<C>(kLog2E);
    const C lowest = -static_cast<C>(__builtin_inf());
    C maximum = p_.sink.dtype == QKNORM_ABSENT ? lowest : sink_logit(p_, logits_, head_of(pair, row));
    const C sink = maximum;
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) maximum = larger(maximum, first[chunk * partial_size() + row]);
    const C reference = maximum == lowest ? C(0) : maximum;
    C total = sink == lowest ? C(0) : exp2(broadcast((sink - reference) * factor))[0];
    for (int64_t i = 0; i < size; ++i) output[i] = 0;
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      const C* partial = first + chunk * partial_size();
      const C weight = exp2(broadcast((partial[row] - reference) * factor))[0];
      const C* from = partial + 2 * rows_ + row * size;
      total += partial[rows_ + row] * weight;
      for (int64_t i = 0; i < size; ++i) output[i] += from[i] * weight;
    }
    multiply_row(output, total == 0 ? C(0) : C(1) / total, size);
    const int64_t token = pair / p_.kv_heads * p_.num_queries + row % p_.num_queries;
    write_row(p_.dtype, output, size, static_cast<T*>(p_.y) + (token * p_.q_heads + head_of(pair, row)) * size);
  }

  const AttentionProblem& p_;
  Runtime& runtime_;
  const Preparation<C>& queries_;
  const Preparation<C>& keys_;
  LogitsStage<C> logits_;
  int64_t rows_;
  int64_t pairs_;
  int64_t chunk_keys_ = 0;
  int64_t chunks_ = 0;
  C* prepared_queries_ = nullptr;
  C* prepared_keys_ = nullptr;
  C* partials_ = nullptr;
};

}  // namespace QKNORM_ISA
}  // namespace qknorm
