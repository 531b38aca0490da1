// The plain C door (qk_norm_params.h): checks, runs, and turns every failure into a status and a message.
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "kernels/cpu/call_runtime.h"
#include "kernels/cpu/check.h"
#include "kernels/cpu/dispatch.h"

namespace qknorm {
namespace {

int32_t fail(qknorm_message* message, int32_t status, const std::string& text) {
  if (message != nullptr) {
    std::strncpy(message->text, text.c_str(), sizeof(message->text) - 1);
    message->text[sizeof(message->text) - 1] = '\0';
  }
  return status;
}

// No exception leaves the library.
template <class Body>
int32_t guarded(qknorm_message* message, const Body& body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return fail(message, QKNORM_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    return fail(message, QKNORM_INVALID_ARGUMENT, error.what());
  }
}

int32_t judge(qknorm_message* message, const std::string& wrong) {
  return wrong.empty() ? static_cast<int32_t>(QKNORM_OK) : fail(message, QKNORM_INVALID_ARGUMENT, wrong);
}

int64_t bytes_of(const AttentionProblem& p, int64_t rows, int64_t row_size) {
  const int64_t value_bytes = p.dtype == QKNORM_DOUBLE ? 8 : p.dtype == QKNORM_FLOAT ? 4 : 2;
  return p.batch * p.kv_heads * rows * row_size * value_bytes;
}

// A present buffer may be the past buffer itself, where both have the same layout, with cache_length and room for the
// new entries; no other overlap.
std::string check_overlap(const AttentionProblem& p, const char* name, const void* past, const void* present,
                          int64_t row_size) {
  if (past == nullptr || present == nullptr || (past == present && p.past_rows == p.total_rows)) return "";
  const auto past_begin = reinterpret_cast<uintptr_t>(past);
  const auto present_begin = reinterpret_cast<uintptr_t>(present);
  const auto past_end = past_begin + static_cast<uintptr_t>(bytes_of(p, p.past_rows, row_size));
  const auto present_end = present_begin + static_cast<uintptr_t>(bytes_of(p, p.total_rows, row_size));
  if (past_end <= present_begin || present_end <= past_begin) return "";
  return std::string("present_") + name + " overlaps past_" + name +
         "; both can be one buffer only with the input cache_length, and where that leaves room for the new entries";
}

}  // namespace
}  // namespace qknorm

using qknorm::guarded;

extern "C" {

int32_t qknorm_cpu_check_attention_attributes(const qknorm::spec::AttentionAttributes* attributes,
                                              qknorm_message* message) {
  return guarded(message, [&] { return qknorm::judge(message, qknorm::check_attributes(*attributes)); });
}

int32_t qknorm_cpu_check_rotary_attributes(const qknorm::spec::RotaryAttributes* attributes, qknorm_message* message) {
  return guarded(message, [&] { return qknorm::judge(message, qknorm::check_attributes(*attributes)); });
}

int32_t qknorm_cpu_attention_shapes(const qknorm::spec::AttentionAttributes* attributes, const qknorm_tensor* inputs,
                                    qknorm_attention_shapes* shapes, qknorm_message* message) {
  return guarded(message, [&]() -> int32_t {
    qknorm::AttentionProblem p;
    const std::string wrong = qknorm::make_attention_problem(*attributes, inputs, &p);
    if (!wrong.empty()) return qknorm::fail(message, QKNORM_INVALID_ARGUMENT, wrong);
    *shapes = {{p.batch, p.num_queries, p.q_heads * p.value_size},
               {p.batch, p.kv_heads, p.total_rows, p.head_size},
               {p.batch, p.kv_heads, p.total_rows, p.value_size}};
    return QKNORM_OK;
  });
}

int32_t qknorm_cpu_attention(const qknorm::spec::AttentionAttributes* attributes, const qknorm_tensor* inputs, void* y,
                             void* present_key, void* present_value, const qknorm_executor* executor,
                             qknorm_message* message) {
  return guarded(message, [&]() -> int32_t {
    qknorm::AttentionProblem p;
    std::string wrong = qknorm::make_attention_problem(*attributes, inputs, &p);
    if (wrong.empty()) wrong = qknorm::check_overlap(p, "key", p.past_key, present_key, p.head_size);
    if (wrong.empty()) wrong = qknorm::check_overlap(p, "value", p.past_value, present_value, p.value_size);
    if (!wrong.empty()) return qknorm::fail(message, QKNORM_INVALID_ARGUMENT, wrong);
    p.y = y;
    p.present_key = present_key;
    p.present_value = present_value;
    qknorm::CallRuntime runtime(executor);
    qknorm::kernels().attention(p, runtime);
    if (runtime.failed()) return qknorm::fail(message, QKNORM_OUT_OF_MEMORY, "out of memory for the kernel's scratch");
    return QKNORM_OK;
  });
}

int32_t qknorm_cpu_rotary(const qknorm::spec::RotaryAttributes* attributes, const qknorm_tensor* inputs, void* y,
                          const qknorm_executor* executor, qknorm_message* message) {
  return guarded(message, [&]() -> int32_t {
    qknorm::RotaryProblem p;
    const std::string wrong = qknorm::make_rotary_problem(*attributes, inputs, &p);
    if (!wrong.empty()) return qknorm::fail(message, QKNORM_INVALID_ARGUMENT, wrong);
    p.y = y;
    qknorm::CallRuntime runtime(executor);
    qknorm::kernels().rotary(p, runtime);
    if (runtime.failed()) return qknorm::fail(message, QKNORM_OUT_OF_MEMORY, "out of memory for the kernel's scratch");
    return QKNORM_OK;
  });
}

const char* qknorm_cpu_instruction_set(void) { return qknorm::kernels().name; }

int32_t qknorm_cpu_select_instruction_set(const char* name) { return qknorm::select_kernels(name) ? 0 : 1; }

}  // extern "C"
