// Fetching rows that are needed soon while the arithmetic units are busy. Rows of a head lie a whole token apart, where
// the processor's own prefetcher does not find the next one.
#pragma once

#include "kernels/cpu/isa/vector.h"

namespace qknorm {
namespace QKNORM_ISA {

// `rows` rows of `row_bytes`, `stride_bytes` apart.
struct FarRows {
  const void* data = nullptr;
  int64_t stride_bytes = 0;
  int64_t row_bytes = 0;
  int64_t rows = 0;

  int64_t lines_per_row() const { return row_bytes / 64 + 1; }
};

// Brings them into the second-level cache, a few lines at each step. The address may lie behind a buffer's end (it is
// fetched, not read), so it is no pointer.
class RowsAhead {
 public:
  RowsAhead() = default;
  RowsAhead(const FarRows& rows, int64_t steps)
      : rows_(rows), per_step_(ceil_div(rows.rows * rows.lines_per_row(), larger(steps, int64_t{1}))) {}

  QKNORM_INLINE void step() {
    for (int64_t i = 0; i < per_step_ && row_ < rows_.rows; ++i) {
      const auto address = reinterpret_cast<uintptr_t>(rows_.data) + static_cast<uintptr_t>(row_ * rows_.stride_bytes);
      __builtin_prefetch(reinterpret_cast<const void*>(address + static_cast<uintptr_t>(64 * line_)), 0, 2);
      if (++line_ == rows_.lines_per_row()) {
        line_ = 0;
        ++row_;
      }
    }
  }

 private:
  FarRows rows_;
  int64_t per_step_ = 0;
  int64_t row_ = 0;
  int64_t line_ = 0;
};

}  // namespace QKNORM_ISA
}  // namespace qknorm
