// What random calls cannot show: instruction sets agree, threads change nothing, memory that runs out is an error.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "random_call.h"

using namespace qknorm;
using namespace qknorm::testing;

namespace {

int64_t passed = 0;

void expect(bool condition, const std::string& what) {
  if (!condition) {
    std::fprintf(stderr, "failed: %s\n", what.c_str());
    std::exit(1);
  }
  ++passed;
}

struct Result {
  int32_t status;
  Tensor y;
  std::string message;
};

Result run(const AttentionCall& call, const qknorm_executor* executor) {
  const std::vector<qknorm_tensor> inputs = views(call.inputs);
  qknorm_attention_shapes shapes{};
  qknorm_message message{};
  int32_t status = qknorm_cpu_attention_shapes(&call.attributes, inputs.data(), &shapes, &message);
  expect(status == QKNORM_OK, std::string("a good call is accepted: ") + message.text);
  Tensor y(call.inputs[0].dtype(), {shapes.y[0], shapes.y[1], shapes.y[2]});
  status = qknorm_cpu_attention(&call.attributes, inputs.data(), y.data(), nullptr, nullptr, executor, &message);
  return {status, std::move(y), message.text};
}

double largest_difference(const Tensor& a, const Tensor& b) {
  double largest = 0;
  for (int64_t i = 0; i < a.count(); ++i) largest = std::fmax(largest, std::fabs(a.get(i) - b.get(i)));
  return largest;
}

// The sum of |Y| is at most a few units: values are normal, weights sum to 1.
double tolerance(int64_t dtype) {
  switch (dtype) {
    case QKNORM_DOUBLE:
      return 1e-11;
    case QKNORM_FLOAT:
      return 3e-4;
    case QKNORM_FLOAT16:
      return 0.05;
    default:
      return 0.4;
  }
}

void instruction_sets_and_threads_agree() {
  const ThreadExecutor threads(3);
  const char* const others[] = {"avx2", "avx512"};
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    const AttentionCall call = random_attention(random);
    expect(qknorm_cpu_select_instruction_set("portable") == 0, "the portable kernels are always there");
    const Result alone = run(call, nullptr);
    const Result shared = run(call, threads.get());
    expect(alone.status == QKNORM_OK && shared.status == QKNORM_OK, "both run");
    const double limit = tolerance(call.inputs[0].dtype());
    expect(largest_difference(alone.y, shared.y) <= limit, "threads change nothing, case " + std::to_string(seed));
    for (const char* name : others) {
      if (qknorm_cpu_select_instruction_set(name) != 0) continue;
      const Result other = run(call, nullptr);
      expect(largest_difference(alone.y, other.y) <= limit,
             std::string(name) + " agrees, case " + std::to_string(seed));
    }
  }
}

// Refuses the n-th request for memory.
struct StingyAllocator {
  int64_t left;
  int64_t held = 0;
};

void running_out_of_memory_is_an_error() {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Random random(seed);
    const AttentionCall call = random_attention(random);
    for (int64_t granted = 0; granted < 20; ++granted) {
      StingyAllocator allocator{granted};
      qknorm_executor executor{};
      executor.context = &allocator;
      executor.threads = 1;
      executor.parallel_for = [](void*, int64_t count, void (*task)(void*, int64_t), void* argument) {
        for (int64_t i = 0; i < count; ++i) task(argument, i);
      };
      executor.allocate = [](void* of, size_t bytes) -> void* {
        auto* self = static_cast<StingyAllocator*>(of);
        if (self->left == 0) return nullptr;
        --self->left;
        ++self->held;
        return std::malloc(bytes);
      };
      executor.release = [](void* of, void* memory) {
        --static_cast<StingyAllocator*>(of)->held;
        std::free(memory);
      };
      const Result result = run(call, &executor);
      expect(allocator.held == 0, "all memory is given back");
      if (result.status == QKNORM_OK) break;
      expect(result.status == QKNORM_OUT_OF_MEMORY, "out of memory is said: " + result.message);
    }
  }
}

// Halves to float and back, over all 65536 of them.
void every_half_survives() {
  for (const int64_t dtype : {QKNORM_FLOAT16, QKNORM_BFLOAT16}) {
    RotaryCall call;
    call.attributes.num_heads = 1;
    call.attributes.norm_groups = 1;
    call.attributes.rotary_sections = 1;
    Tensor& x = call.inputs[spec::kRotaryInputX] = Tensor(dtype, {1, 1, 65536});
    for (int64_t i = 0; i < 65536; ++i) {
      const auto bits = static_cast<uint16_t>(i);
      std::memcpy(static_cast<char*>(x.data()) + 2 * i, &bits, 2);
    }
    const std::vector<qknorm_tensor> inputs = views(call.inputs);
    for (const char* name : {"portable", "avx2", "avx512"}) {
      if (qknorm_cpu_select_instruction_set(name) != 0) continue;
      Tensor y(dtype, {1, 1, 65536});
      qknorm_message message{};
      expect(qknorm_cpu_rotary(&call.attributes, inputs.data(), y.data(), nullptr, &message) == QKNORM_OK,
             message.text);
      for (int64_t i = 0; i < 65536; ++i) {
        const bool same =
            std::memcmp(static_cast<char*>(x.data()) + 2 * i, static_cast<char*>(y.data()) + 2 * i, 2) == 0;
        expect(same || (std::isnan(x.get(i)) && std::isnan(y.get(i))),
               std::string(name) + " keeps " + std::to_string(i));
      }
    }
  }
}

void overlapping_cache_is_refused() {
  Random random(1);
  AttentionCall call;
  call.attributes.q_num_heads = call.attributes.kv_num_heads = call.attributes.norm_groups = 1;
  call.attributes.rotary_sections = 1;
  call.attributes.left_window_size = call.attributes.right_window_size = -1;
  call.attributes.scale = 1;
  for (int i = 0; i < 3; ++i) {
    call.inputs[static_cast<size_t>(i)] = Tensor(QKNORM_FLOAT, {2, 1, 4});
    call.inputs[static_cast<size_t>(i)].fill_normal(random, 0, 1);
  }
  call.inputs[spec::kAttentionInputPastKey] = Tensor(QKNORM_FLOAT, {2, 1, 3, 4});
  call.inputs[spec::kAttentionInputPastValue] = Tensor(QKNORM_FLOAT, {2, 1, 3, 4});
  const std::vector<qknorm_tensor> inputs = views(call.inputs);
  Tensor y(QKNORM_FLOAT, {2, 1, 4});
  Tensor value(QKNORM_FLOAT, {2, 1, 4, 4});
  qknorm_message message{};
  const int32_t status =
      qknorm_cpu_attention(&call.attributes, inputs.data(), y.data(), call.inputs[spec::kAttentionInputPastKey].data(),
                           value.data(), nullptr, &message);
  expect(status == QKNORM_INVALID_ARGUMENT && std::strstr(message.text, "present_key") != nullptr,
         "a growing cache cannot be written over itself");
}

}  // namespace

int main() {
  instruction_sets_and_threads_agree();
  running_out_of_memory_is_an_error();
  every_half_survives();
  overlapping_cache_is_refused();
  std::printf("%lld passed, 0 failed\n", static_cast<long long>(passed));
  return 0;
}
