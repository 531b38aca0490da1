// Which keys a query row sees by causality, windows and the filled part of the cache: always one interval.
#pragma once

#include "kernels/cpu/isa/vector.h"
#include "kernels/cpu/problem.h"

namespace qknorm {
namespace QKNORM_ISA {

struct KeyRange {
  int64_t begin;
  int64_t end;
};

// Entries of the past that are valid in one batch row; the new ones follow.
QKNORM_INLINE int64_t past_length(const AttentionProblem& p, int64_t batch) {
  return p.cache_length != nullptr ? p.cache_length[batch] : p.past_rows;
}

QKNORM_INLINE int64_t valid_keys(const AttentionProblem& p, int64_t batch) {
  return past_length(p, batch) + p.num_new_keys;
}

QKNORM_INLINE int64_t first_query_position(const AttentionProblem& p, int64_t batch) {
  const int64_t position = p.query_offset != nullptr ? p.query_offset[batch] : past_length(p, batch);
  return smaller(larger(position, -kFarthestPosition), kFarthestPosition);
}

// Empty ranges have end <= begin.
QKNORM_INLINE KeyRange visible_range(const AttentionProblem& p, int64_t batch, int64_t query) {
  const int64_t position = first_query_position(p, batch) + query;
  const int64_t end = smaller(valid_keys(p, batch), p.columns_of_bias);
  return {larger(position - p.keys_before, int64_t{0}), smaller(position + p.keys_after + 1, end)};
}

// What any query of [first, first + count) sees.
QKNORM_INLINE KeyRange visible_range(const AttentionProblem& p, int64_t batch, int64_t first, int64_t count) {
  return {visible_range(p, batch, first).begin, visible_range(p, batch, first + count - 1).end};
}

}  // namespace QKNORM_ISA
}  // namespace qknorm
