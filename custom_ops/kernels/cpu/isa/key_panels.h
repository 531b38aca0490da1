// Keys and values of one (batch, kv head) pair, packed for the micro-kernel; new entries are prepared and written to
// the present buffers on the way.
//
// Keys: panels of kColumns keys, [panel][head size][key]. Values: tiles of kTileKeys keys, [tile][column
// panel][key][column].
#pragma once

#include "kernels/cpu/isa/micro_kernel.h"
#include "kernels/cpu/isa/preparation.h"
#include "kernels/cpu/isa/visibility.h"

namespace qknorm {
namespace QKNORM_ISA {

// Keys whose logits of all strips are held at a time.
inline constexpr int64_t kTileKeys = 128;

// Transposes `count` rows (at most kLanes, `stride` apart) of `size` values to out[i * out_stride + row]. Writes kLanes
// values at each out + i * out_stride, zeros in the lanes without a row.
template <class C>
QKNORM_INLINE void transpose_rows(const C* rows, int64_t stride, int64_t count, int64_t size, C* out,
                                  int64_t out_stride) {
  constexpr int lanes = kLanes<C>;
  int64_t i = 0;
  for (; i + lanes <= size; i += lanes) {
    Vector<C> block[lanes];
    for (int r = 0; r < lanes; ++r) block[r] = r < count ? load(rows + r * stride + i) : Vector<C>{};
    transpose<C>(block);
    for (int r = 0; r < lanes; ++r) store(out + (i + r) * out_stride, block[r]);
  }
  for (; i < size; ++i) {
    C column[lanes] = {};
    for (int64_t r = 0; r < count; ++r) column[r] = rows[r * stride + i];
    store(out + i * out_stride, load(column));
  }
}

template <class C>
class KeyPanels {
 public:
  KeyPanels(const AttentionProblem& problem, const Preparation<C>& key_preparation)
      : p_(problem),
        keys_(key_preparation),
        padded_keys_(round_up(problem.total_rows, kTileKeys)),
        value_panels_(ceil_div(problem.value_size, Tile<C>::kColumns)) {}

  int64_t value_panels() const { return value_panels_; }
  int64_t key_elements() const { return padded_keys_ * p_.head_size; }
  // Elements of one pair, with slack that is prefetched but never used.
  int64_t elements() const { return key_elements() + padded_keys_ * value_panels_ * Tile<C>::kColumns + kSlack; }

  // Scratch elements that pack() needs.
  int64_t scratch_size() const {
    return Tile<C>::kColumns * p_.head_size + keys_.scratch_size() + value_panels_ * Tile<C>::kColumns;
  }

  const C* key_panel(const C* panels, int64_t first_key) const { return panels + first_key * p_.head_size; }
  const C* value_panel(const C* panels, int64_t first_key, int64_t panel) const {
    return panels + key_elements() + (first_key * value_panels_ + panel * kTileKeys) * Tile<C>::kColumns;
  }

  // Packs the tile that begins at `first_key`, whose valid keys end at `end`.
  void pack_tile(int64_t batch, int64_t kv_head, int64_t first_key, int64_t end, C* scratch, C* panels) const {
    constexpr int columns = Tile<C>::kColumns;
    const int64_t size = p_.head_size;
    const int64_t stop = smaller(first_key + kTileKeys, end);
    for (int64_t key = first_key; key < stop; key += columns) {
      const int64_t count = smaller(int64_t{columns}, stop - key);
      C* rows = scratch;
      key_rows(batch, kv_head, key, count, rows + columns * size, rows);
      C* panel = panels + key * size;
      for (int64_t half = 0; half < columns; half += kLanes<C>) {
        const int64_t present = larger(smaller(count - half, int64_t{kLanes<C>}), int64_t{0});
        transpose_rows(rows + half * size, size, present, size, panel + half, columns);
      }
    }
    C* values = panels + key_elements() + first_key * value_panels_ * columns;
    for (int64_t key = first_key; key < stop; ++key) {
      value_row(batch, kv_head, key, scratch, values + (key - first_key) * columns);
    }
  }

 private:
  static constexpr int64_t kSlack = 8192;
  static constexpr int64_t kRowsAhead = 6;

  void key_rows(int64_t batch, int64_t kv_head, int64_t first, int64_t count, C* scratch, C* rows) const {
    const int64_t size = p_.head_size;
    const int64_t pair = batch * p_.kv_heads + kv_head;
    const int64_t past = past_length(p_, batch);
    const int64_t old = larger(smaller(past - first, count), int64_t{0});
    if (old > 0) {
      read_row(p_.dtype, element(p_.past_key, p_.dtype, (pair * p_.past_rows + first) * size), old * size, rows);
    }
    if (old == count) return;
    keys_.prepare_rows(batch, kv_head, first + old - past, count - old, C(1), scratch, rows + old * size);
    if (p_.present_key != nullptr) {
      void* present = element(p_.present_key, p_.dtype, (pair * p_.total_rows + first + old) * size);
      write_row(p_.dtype, rows + old * size, (count - old) * size, present);
    }
  }

  // Spreads one value row over the column panels; the columns behind the last value are zero.
  void value_row(int64_t batch, int64_t kv_head, int64_t key, C* scratch, C* out) const {
    constexpr int columns = Tile<C>::kColumns;
    const int64_t size = p_.value_size;
    const int64_t past = past_length(p_, batch);
    const int64_t pair = batch * p_.kv_heads + kv_head;
    const void* from;
    if (key < past) {
      from = element(p_.past_value, p_.dtype, (pair * p_.past_rows + key) * size);
    } else {
      const int64_t token = batch * p_.num_new_keys + key - past;
      from = element(p_.value, p_.dtype, (token * p_.kv_heads + kv_head) * size);
      if (key + kRowsAhead < past + p_.num_new_keys) prefetch_row(from, kRowsAhead * p_.kv_heads * size);
      if (p_.present_value != nullptr) {
        const int64_t bytes = size * storage_size(p_.dtype);
        __builtin_memcpy(element(p_.present_value, p_.dtype, (pair * p_.total_rows + key) * size), from,
                         static_cast<size_t>(bytes));
      }
    }
    const C* row = scratch;
    if (p_.dtype == dtype_of<C>() && size % columns == 0) {
      row = static_cast<const C*>(from);
    } else {
      for (int64_t i = size; i < value_panels_ * columns; ++i) scratch[i] = 0;
      read_row(p_.dtype, from, size, scratch);
    }
    for (int64_t panel = 0; panel < value_panels_; ++panel) {
      C* to = out + panel * kTileKeys * columns;
      store(to, load(row + panel * columns));
      store(to + kLanes<C>, load(row + panel * columns + kLanes<C>));
    }
  }

  // `ahead` in elements; the row there exists.
  void prefetch_row(const void* from, int64_t ahead) const {
    const char* row = static_cast<const char*>(element(from, p_.dtype, ahead));
    const int64_t bytes = p_.value_size * storage_size(p_.dtype);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
  }

  const AttentionProblem& p_;
  const Preparation<C>& keys_;
  int64_t padded_keys_;
  int64_t value_panels_;
};

}  // namespace QKNORM_ISA
}  // namespace qknorm
