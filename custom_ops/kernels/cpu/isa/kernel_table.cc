// Both operators for one instruction set: compiled once for each, with QKNORM_ISA as the namespace.
#include "kernels/cpu/isa/decode.h"
#include "kernels/cpu/isa/prefill.h"

#define QKNORM_TEXT_OF(name) #name
#define QKNORM_TEXT(name) QKNORM_TEXT_OF(name)

namespace qknorm {
namespace QKNORM_ISA {
namespace {

// Zeros where buffers that grow have entries that neither the past nor the new tokens fill.
void clear_room(const AttentionProblem& p, void* present, int64_t row_size) {
  if (present == nullptr || p.total_rows == p.past_rows) return;
  for (int64_t pair = 0; pair < p.batch * p.kv_heads; ++pair) {
    const int64_t begin = larger(p.past_rows, valid_keys(p, pair / p.kv_heads));
    if (begin >= p.total_rows) continue;
    const int64_t bytes = (p.total_rows - begin) * row_size * storage_size(p.dtype);
    __builtin_memset(element(present, p.dtype, (pair * p.total_rows + begin) * row_size), 0,
                     static_cast<size_t>(bytes));
  }
}

// Copies the past into present buffers that are not the past buffers themselves.
void copy_past(const AttentionProblem& p, Runtime& runtime, const void* past, void* present, int64_t row_size) {
  if (past == nullptr || present == nullptr || past == present || p.past_rows == 0) return;
  const int64_t past_bytes = p.past_rows * row_size * storage_size(p.dtype);
  const int64_t present_bytes = p.total_rows * row_size * storage_size(p.dtype);
  parallel(runtime, p.batch * p.kv_heads, [&](int64_t pair) {
    __builtin_memcpy(static_cast<char*>(present) + pair * present_bytes,
                     static_cast<const char*>(past) + pair * past_bytes, static_cast<size_t>(past_bytes));
  });
}

template <class C>
void attend(const AttentionProblem& p, Runtime& runtime) {
  const Preparation<C> queries(p.query, runtime);
  const Preparation<C> keys(p.key, runtime);
  if (runtime.failed()) return;
  clear_room(p, p.present_key, p.head_size);
  clear_room(p, p.present_value, p.value_size);
  if (is_decode(p)) {
    if constexpr (sizeof(C) == 8) {
      if (p.dtype == QKNORM_DOUBLE) return Decode<C, double>(p, runtime, queries, keys).run();
    } else {
      switch (p.dtype) {
        case QKNORM_FLOAT:
          return Decode<C, float>(p, runtime, queries, keys).run();
        case QKNORM_FLOAT16:
          return Decode<C, Half>(p, runtime, queries, keys).run();
        default:
          return Decode<C, BFloat16>(p, runtime, queries, keys).run();
      }
    }
  }
  copy_past(p, runtime, p.past_key, p.present_key, p.head_size);
  copy_past(p, runtime, p.past_value, p.present_value, p.value_size);
  Prefill<C>(p, runtime, queries, keys).run();
}

void attention(const AttentionProblem& problem, Runtime& runtime) {
  if (problem.batch == 0) return;
  if (problem.in_double) {
    attend<double>(problem, runtime);
  } else {
    attend<float>(problem, runtime);
  }
}

template <class C>
void prepare_all(const RotaryProblem& problem, Runtime& runtime) {
  const Preparation<C> preparation(problem.preparation, runtime);
  if (runtime.failed()) return;
  const PreparationPlan& plan = problem.preparation;
  const int64_t tokens = plan.batch * plan.length;
  constexpr int64_t kTokensPerTask = 8;
  parallel(runtime, ceil_div(tokens, kTokensPerTask), [&](int64_t task) {
    Borrowed<C> row(runtime, plan.head_size + preparation.scratch_size());
    if (row.data() == nullptr) return;
    const int64_t end = smaller((task + 1) * kTokensPerTask, tokens);
    for (int64_t token = task * kTokensPerTask; token < end; ++token) {
      for (int64_t head = 0; head < plan.num_heads; ++head) {
        preparation.prepare_row(token / plan.length, head, token % plan.length, C(1), row.data() + plan.head_size,
                                row.data());
        write_row(plan.dtype, row.data(), plan.head_size,
                  element(problem.y, plan.dtype, (token * plan.num_heads + head) * plan.head_size));
      }
    }
  });
}

void rotary(const RotaryProblem& problem, Runtime& runtime) {
  if (problem.in_double) {
    prepare_all<double>(problem, runtime);
  } else {
    prepare_all<float>(problem, runtime);
  }
}

}  // namespace

extern const KernelTable kKernels;
const KernelTable kKernels = {QKNORM_TEXT(QKNORM_ISA), attention, rotary};

}  // namespace QKNORM_ISA
}  // namespace qknorm
