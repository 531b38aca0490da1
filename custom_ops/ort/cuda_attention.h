// Both operators as launches of the kernel pack's images: the plan of
// export/torch_export/operators/triton_attention.py.
#pragma once

#include <functional>
#include <string>

#include "ort/cuda_pack.h"

namespace qknorm::cuda {

// Where device memory for intermediate results comes from; it is used by work on the stream after it was given back.
struct Memory {
  void* context;
  void* (*allocate)(void* context, size_t bytes);  // NULL where there is none
  void (*release)(void* context, void* memory);
};

struct Target {
  Pack* pack;
  Stream stream;
  Memory memory;
};

// Why the CUDA kernels do not serve this node, from its attributes alone; empty where they do.
// The sentences are those of qknorm_onnx/spec/cuda_support.py.
std::string refusal(const spec::AttentionAttributes& attributes, int64_t dtype);
std::string refusal(const spec::RotaryAttributes& attributes, int64_t dtype);

// Checks, then enqueues the whole operator. `inputs` as for qknorm_cpu_attention, with device pointers; present_key and
// present_value may be NULL or, with cache_length, equal to the past buffers. Entries that do not fit behind
// cache_length are not written, and their rows of y are NaN: reading it here would wait for the device.
// Throws std::invalid_argument for inputs that contradict each other or that no kernel serves, else Driver-, PackError.
void run_attention(const spec::AttentionAttributes& attributes, const qknorm_tensor* inputs, void* y, void* present_key,
                   void* present_value, const Target& target);
void run_rotary(const spec::RotaryAttributes& attributes, const qknorm_tensor* inputs, void* y, const Target& target);

// Shapes of the outputs. Throws std::invalid_argument.
qknorm_attention_shapes attention_shapes(const spec::AttentionAttributes& attributes, const qknorm_tensor* inputs);

}  // namespace qknorm::cuda
