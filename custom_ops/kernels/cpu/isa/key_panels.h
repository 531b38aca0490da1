// Keys and values of one (batch, kv head) pair, packed for the micro-kernel; new entries are prepared and written to
// the present buffers on the way.
//
// Keys: panels of kRows keys, [panel][head size][key]. Values: tiles of kKeys keys, [tile][column panel][key][column],
// with kRows columns in a panel.
#pragma once

#include "kernels/cpu/isa/micro_kernel.h"
#include "kernels/cpu/isa/preparation.h"
#include "kernels/cpu/isa/rows_ahead.h"
#include "kernels/cpu/isa/visibility.h"

namespace qknorm {
namespace QKNORM_ISA {

// Transposes `count` rows (at most kLanes, `stride` apart) of `size` values to out[i * out_stride + row]. Writes
// `Lanes` values at each out + i * out_stride, zeros in those without a row. Reads whole vectors where `size` has them.
template <class C, int Lanes>
QKNORM_INLINE void transpose_rows(const C* rows, int64_t stride, int64_t count, int64_t size, C* out,
                                  int64_t out_stride) {
  constexpr int lanes = kLanes<C>;
  int64_t i = 0;
  for (; i + lanes <= size; i += lanes) {
    Vector<C> block[lanes];
    for (int r = 0; r < lanes; ++r) block[r] = r < count ? load(rows + r * stride + i) : Vector<C>{};
    transpose<C>(block);
    for (int r = 0; r < lanes; ++r) __builtin_memcpy(out + (i + r) * out_stride, &block[r], Lanes * sizeof(C));
  }
  for (; i < size; ++i) {
    C column[lanes] = {};
    for (int64_t r = 0; r < count; ++r) column[r] = rows[r * stride + i];
    __builtin_memcpy(out + i * out_stride, column, Lanes * sizeof(C));
  }
}

template <class C>
class KeyPanels {
 public:
  KeyPanels(const AttentionProblem& problem, const Preparation<C>& key_preparation)
      : p_(problem),
        keys_(key_preparation),
        padded_keys_(round_up(problem.longest_row, kKeys)),
        value_panels_(ceil_div(problem.value_size, int64_t{kRows})) {}

  int64_t value_panels() const { return value_panels_; }
  int64_t key_elements() const { return padded_keys_ * p_.head_size; }
  // Elements of one pair.
  int64_t elements() const { return key_elements() + padded_keys_ * value_panels_ * kRows; }

  // Scratch elements that pack() needs.
  int64_t scratch_size() const { return kRows * p_.head_size + keys_.scratch_size() + p_.value_size; }

  const C* key_panel(const C* panels, int64_t first_key) const { return panels + first_key * p_.head_size; }
  const C* value_panel(const C* panels, int64_t first_key, int64_t panel) const {
    return panels + key_elements() + (first_key * value_panels_ + panel * kKeys) * kRows;
  }

  // Packs the tile that begins at `first_key`, whose valid keys end at `end`.
  void pack_tile(int64_t batch, int64_t kv_head, int64_t first_key, int64_t end, C* scratch, C* panels) const {
    const int64_t size = p_.head_size;
    const int64_t stop = smaller(first_key + kKeys, end);
    C* values = panels + key_elements() + first_key * value_panels_ * kRows;
    for (int64_t key = first_key; key < stop; key += kRows) {
      const int64_t count = smaller(int64_t{kRows}, stop - key);
      RowsAhead(new_rows(batch, p_.key.x, p_.head_size, kv_head, key + kRows, stop), 1).step();
      RowsAhead(new_rows(batch, p_.value, p_.value_size, kv_head, key + kRows, stop), 1).step();
      key_rows(batch, kv_head, key, count, scratch + kRows * size, scratch);
      transpose_rows<C, kRows>(scratch, size, count, size, panels + key * size, kRows);
      for (int64_t i = key; i < key + count; ++i) {
        value_row(batch, kv_head, i, scratch, values + (i - first_key) * kRows);
      }
    }
  }

 private:
  static constexpr int kRows = Tile<C>::kRows;
  static constexpr int64_t kKeys = Tile<C>::kKeys;

  // The new ones of a panel's rows, where they lie in `from`.
  FarRows new_rows(int64_t batch, const void* from, int64_t size, int64_t kv_head, int64_t first, int64_t stop) const {
    const int64_t past = past_length(p_, batch);
    const int64_t begin = larger(first - past, int64_t{0});
    const int64_t count = smaller(first + kRows, stop) - past - begin;
    const int64_t bytes = size * storage_size(p_.dtype);
    const int64_t row = (batch * p_.num_new_keys + begin) * p_.kv_heads + kv_head;
    return {element(from, p_.dtype, row * size), p_.kv_heads * bytes, bytes, count};
  }

  void key_rows(int64_t batch, int64_t kv_head, int64_t first, int64_t count, C* scratch, C* rows) const {
    const int64_t size = p_.head_size;
    const int64_t pair = batch * p_.kv_heads + kv_head;
    const int64_t past = past_length(p_, batch);
    const int64_t old = larger(smaller(past - first, count), int64_t{0});
    if (old > 0) {
      read_row(p_.dtype, element(p_.past_key, p_.dtype, (pair * p_.past_rows + first) * size), old * size, rows);
    }
    if (old == count) return;
    keys_.prepare_rows(batch, kv_head, first + old - past, count - old, C(1), scratch, rows + old * size, size);
    if (p_.present_key != nullptr) {
      void* present = element(p_.present_key, p_.dtype, (pair * p_.total_rows + first + old) * size);
      write_row(p_.dtype, rows + old * size, (count - old) * size, present);
    }
  }

  // Spreads one value row over the column panels; the columns behind the last value are zero.
  void value_row(int64_t batch, int64_t kv_head, int64_t key, C* scratch, C* out) const {
    const int64_t size = p_.value_size;
    const int64_t past = past_length(p_, batch);
    const int64_t pair = batch * p_.kv_heads + kv_head;
    const void* from;
    if (key < past) {
      from = element(p_.past_value, p_.dtype, (pair * p_.past_rows + key) * size);
    } else {
      const int64_t token = batch * p_.num_new_keys + key - past;
      from = element(p_.value, p_.dtype, (token * p_.kv_heads + kv_head) * size);
      if (p_.present_value != nullptr) {
        const int64_t bytes = size * storage_size(p_.dtype);
        __builtin_memcpy(element(p_.present_value, p_.dtype, (pair * p_.total_rows + key) * size), from,
                         static_cast<size_t>(bytes));
      }
    }
    const C* row = scratch;
    if (p_.dtype == dtype_of<C>()) {
      row = static_cast<const C*>(from);
    } else {
      read_row(p_.dtype, from, size, scratch);
    }
    int64_t i = 0;
    for (; i + kRows <= size; i += kRows) __builtin_memcpy(out + i * kKeys, row + i, kRows * sizeof(C));
    if (i < size) {
      C last[kRows] = {};
      for (int64_t j = i; j < size; ++j) last[j - i] = row[j];
      __builtin_memcpy(out + i * kKeys, last, kRows * sizeof(C));
    }
  }

  const AttentionProblem& p_;
  const Preparation<C>& keys_;
  int64_t padded_keys_;
  int64_t value_panels_;
};

}  // namespace QKNORM_ISA
}  // namespace qknorm
