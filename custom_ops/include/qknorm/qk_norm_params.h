// The plain C door of the CPU kernels: no ONNX Runtime, no exceptions, callable through ctypes.
//
// Every tensor is dense and row-major. Shapes and semantics are those of qknorm_onnx/spec (signature.py, reference.py);
// the attribute structs are generated from it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "qknorm/generated/spec.h"

#define QKNORM_EXPORT __attribute__((visibility("default")))

extern "C" {

// ONNX's own numbering of element types (TensorProto.DataType).
enum qknorm_dtype : int32_t {
  QKNORM_ABSENT = 0,
  QKNORM_FLOAT = 1,
  QKNORM_INT64 = 7,
  QKNORM_BOOL = 9,
  QKNORM_FLOAT16 = 10,
  QKNORM_DOUBLE = 11,
  QKNORM_BFLOAT16 = 16,
};

// A tensor that is read; dtype QKNORM_ABSENT stands for an optional input that is not given.
struct qknorm_tensor {
  const void* data;
  const int64_t* dims;
  int64_t rank;
  int64_t dtype;
};

enum qknorm_status : int32_t {
  QKNORM_OK = 0,
  QKNORM_INVALID_ARGUMENT = 1,
  QKNORM_OUT_OF_MEMORY = 2,
};

// What went wrong, as one sentence that names the input, the expected and the given shape.
struct qknorm_message {
  char text[512];
};

// Where the work runs and where scratch memory comes from. All members may be called from several threads at once.
struct qknorm_executor {
  void* context;
  // Calls task(argument, i) for each i in [0, count), in any order, and returns when all are done.
  void (*parallel_for)(void* context, int64_t count, void (*task)(void* argument, int64_t index), void* argument);
  void* (*allocate)(void* context, size_t bytes);  // NULL where there is no memory
  void (*release)(void* context, void* memory);
  int64_t threads;  // a hint for the size of the pieces of work
};

struct qknorm_attention_shapes {
  int64_t y[3];
  int64_t present_key[4];
  int64_t present_value[4];
};

// Checks the attributes alone (a node can be refused before it ever runs).
QKNORM_EXPORT int32_t qknorm_cpu_check_attention_attributes(const qknorm::spec::AttentionAttributes* attributes,
                                                            qknorm_message* message);
QKNORM_EXPORT int32_t qknorm_cpu_check_rotary_attributes(const qknorm::spec::RotaryAttributes* attributes,
                                                         qknorm_message* message);

// Checks attributes, types, shapes and the values of cache_length; writes the shapes of the outputs.
// `inputs` has kAttentionInputCount entries in the order of spec::AttentionInput.
QKNORM_EXPORT int32_t qknorm_cpu_attention_shapes(const qknorm::spec::AttentionAttributes* attributes,
                                                  const qknorm_tensor* inputs, qknorm_attention_shapes* shapes,
                                                  qknorm_message* message);

// Runs the operator. Outputs have the query's type; present_key and present_value may be NULL, or equal past_key and
// past_value, which makes an update in place of a cache with cache_length. `executor` NULL: one thread, malloc.
QKNORM_EXPORT int32_t qknorm_cpu_attention(const qknorm::spec::AttentionAttributes* attributes,
                                           const qknorm_tensor* inputs, void* y, void* present_key, void* present_value,
                                           const qknorm_executor* executor, qknorm_message* message);

// QKNormRotary; y has the shape and type of x. `inputs` has kRotaryInputCount entries.
QKNORM_EXPORT int32_t qknorm_cpu_rotary(const qknorm::spec::RotaryAttributes* attributes, const qknorm_tensor* inputs,
                                        void* y, const qknorm_executor* executor, qknorm_message* message);

// The instruction set whose kernels run: "avx512", "avx2" or "portable".
QKNORM_EXPORT const char* qknorm_cpu_instruction_set(void);

// Chooses the kernels of another instruction set (for tests and benchmarks); 0 where the processor has it.
QKNORM_EXPORT int32_t qknorm_cpu_select_instruction_set(const char* name);

}  // extern "C"
