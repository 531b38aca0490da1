// Rotary position embedding of one row of a head: halves or neighbours, whole or partial, in one or several sections.
#pragma once

#include "kernels/cpu/isa/storage.h"
#include "kernels/cpu/problem.h"

namespace qknorm {
namespace QKNORM_ISA {

// Row (batch, head, position) of a table as C: the table itself where it has that type, else a copy in `scratch`.
template <class C>
QKNORM_INLINE const C* table_row(const StridedInput& table, int64_t width, int64_t batch, int64_t head,
                                 int64_t position, C* scratch) {
  const int64_t index = batch * table.stride[0] + head * table.stride[1] + position * table.stride[2];
  const void* row = element(table.data, table.dtype, index);
  if (table.dtype == (sizeof(C) == 4 ? QKNORM_FLOAT : QKNORM_DOUBLE)) {
    if (width <= 1 || table.stride[3] == 1) return static_cast<const C*>(row);
  }
  read_row(table.dtype, row, width, scratch);
  return scratch;
}

// Pairs (low[i], high[i]), each value with a cosine and a sine of its own.
template <class C>
QKNORM_INLINE void rotate_pairs(C* low, C* high, const C* cos_low, const C* sin_low, const C* cos_high,
                                const C* sin_high, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes<C> <= count; i += kLanes<C>) {
    const Vector<C> x1 = load(low + i);
    const Vector<C> x2 = load(high + i);
    store(low + i, x1 * load(cos_low + i) - x2 * load(sin_low + i));
    store(high + i, x2 * load(cos_high + i) + x1 * load(sin_high + i));
  }
  for (; i < count; ++i) {
    const C x1 = low[i];
    const C x2 = high[i];
    low[i] = x1 * cos_low[i] - x2 * sin_low[i];
    high[i] = x2 * cos_high[i] + x1 * sin_high[i];
  }
}

// `scratch` holds 2 * table_width values.
template <class C>
QKNORM_INLINE void rotate_row(const RotaryPlan& plan, int64_t batch, int64_t head, int64_t position, C* scratch,
                              C* head_row) {
  C* x = head_row + plan.offset;
  const int64_t width = plan.table_width;
  const C* cos = table_row(plan.cos, width, batch, head, position, scratch);
  const C* sin = table_row(plan.sin, width, batch, head, position, scratch + width);
  const bool per_value = width == plan.size;
  if (plan.interleaved) {
    const int64_t pairs = plan.size / 2;
    for (int64_t i = 0; i < pairs; ++i) {
      const int64_t first = per_value ? 2 * i : i;
      const int64_t second = per_value ? first + 1 : i;
      const C x1 = x[2 * i];
      const C x2 = x[2 * i + 1];
      x[2 * i] = x1 * cos[first] - x2 * sin[first];
      x[2 * i + 1] = x2 * cos[second] + x1 * sin[second];
    }
    return;
  }
  const int64_t half = plan.size / plan.sections / 2;
  const int64_t table_step = per_value ? 2 * half : half;
  const int64_t to_second = per_value ? half : 0;
  for (int64_t section = 0; section < plan.sections; ++section) {
    C* low = x + section * 2 * half;
    const C* c = cos + section * table_step;
    const C* s = sin + section * table_step;
    rotate_pairs(low, low + half, c, s, c + to_second, s + to_second, half);
  }
}

}  // namespace QKNORM_ISA
}  // namespace qknorm
