// Random calls, half of them broken, with every instruction set. A call is refused with a message, or it fills its
// outputs with finite numbers; under the sanitizers it touches no byte that is not its own.
//
// fuzz_kernels [cases [first seed]]
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "random_call.h"

using namespace qknorm;
using namespace qknorm::testing;

namespace {

struct Counts {
  int64_t accepted = 0;
  int64_t refused = 0;
};

[[noreturn]] void fail(uint64_t seed, const std::string& what) {
  std::fprintf(stderr, "case %llu: %s\n", static_cast<unsigned long long>(seed), what.c_str());
  std::exit(1);
}

void expect_finite(uint64_t seed, const char* name, const Tensor& tensor) {
  for (int64_t i = 0; i < tensor.count(); ++i) {
    if (!std::isfinite(tensor.get(i))) fail(seed, std::string(name) + " is not finite at " + std::to_string(i));
  }
}

void expect_message(uint64_t seed, int32_t status, const qknorm_message& message) {
  if (status != QKNORM_INVALID_ARGUMENT) fail(seed, "refused with status " + std::to_string(status));
  if (std::strlen(message.text) < 10) fail(seed, "refused without a message");
}

Tensor output(int64_t dtype, const int64_t* dims, size_t rank) {
  Tensor tensor(dtype, std::vector<int64_t>(dims, dims + rank));
  tensor.fill(NAN);
  return tensor;
}

bool run_attention(uint64_t seed, Random& random, const qknorm_executor* executor, bool broken) {
  AttentionCall call = random_attention(random);
  if (broken) {
    break_call(random, spec::kAttentionAttributes, std::size(spec::kAttentionAttributes), &call.attributes,
               call.inputs);
  }
  const std::vector<qknorm_tensor> inputs = views(call.inputs);
  qknorm_attention_shapes shapes{};
  qknorm_message message{};
  const int32_t status = qknorm_cpu_attention_shapes(&call.attributes, inputs.data(), &shapes, &message);
  if (status != QKNORM_OK) {
    if (!broken) fail(seed, std::string("a good call was refused: ") + message.text);
    expect_message(seed, status, message);
    return false;
  }
  const int64_t dtype = call.inputs[0].dtype();
  Tensor y = output(dtype, shapes.y, 3);
  Tensor key = output(dtype, shapes.present_key, 4);
  Tensor value = output(dtype, shapes.present_value, 4);
  const bool with_present = random.chance(0.7);
  const bool has_room = call.inputs[spec::kAttentionInputCacheLength].given() &&
                        shapes.present_key[2] == call.inputs[spec::kAttentionInputPastKey].dims()[2];
  const bool in_place = has_room && random.chance(0.7);
  void* key_buffer = in_place ? call.inputs[spec::kAttentionInputPastKey].data() : key.data();
  void* value_buffer = in_place ? call.inputs[spec::kAttentionInputPastValue].data() : value.data();
  const int32_t run =
      qknorm_cpu_attention(&call.attributes, inputs.data(), y.data(), with_present ? key_buffer : nullptr,
                           with_present ? value_buffer : nullptr, executor, &message);
  if (run != QKNORM_OK) fail(seed, std::string("accepted, but failed: ") + message.text);
  if (broken) return true;  // its numbers may be anything
  expect_finite(seed, "Y", y);
  if (with_present && !in_place) {
    expect_finite(seed, "present_key", key);
    expect_finite(seed, "present_value", value);
  }
  return true;
}

bool run_rotary(uint64_t seed, Random& random, const qknorm_executor* executor, bool broken) {
  RotaryCall call = random_rotary(random);
  if (broken) {
    break_call(random, spec::kRotaryAttributes, std::size(spec::kRotaryAttributes), &call.attributes, call.inputs);
  }
  const std::vector<qknorm_tensor> inputs = views(call.inputs);
  const Tensor& x = call.inputs[spec::kRotaryInputX];
  Tensor y = x.given() ? output(x.dtype(), inputs[0].dims, static_cast<size_t>(inputs[0].rank)) : Tensor();
  qknorm_message message{};
  const int32_t status = qknorm_cpu_rotary(&call.attributes, inputs.data(), y.data(), executor, &message);
  if (status != QKNORM_OK) {
    if (!broken) fail(seed, std::string("a good call was refused: ") + message.text);
    expect_message(seed, status, message);
    return false;
  }
  if (!broken) expect_finite(seed, "Y", y);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t cases = argc > 1 ? std::atoll(argv[1]) : 20000;
  const auto first = static_cast<uint64_t>(argc > 2 ? std::atoll(argv[2]) : 0);
  const char* const instruction_sets[] = {"portable", "avx2", "avx512"};
  const ThreadExecutor threads(2);
  Counts counts;
  for (int64_t i = 0; i < cases; ++i) {
    const uint64_t seed = first + static_cast<uint64_t>(i);
    Random random(seed);
    qknorm_cpu_select_instruction_set(instruction_sets[seed % 3]);  // stays where the processor lacks it
    const qknorm_executor* executor = random.chance(0.05) ? threads.get() : nullptr;
    const bool broken = random.chance(0.5);
    const bool accepted = random.chance(0.75) ? run_attention(seed, random, executor, broken)
                                              : run_rotary(seed, random, executor, broken);
    (accepted ? counts.accepted : counts.refused) += 1;
  }
  std::printf("%lld passed, 0 failed (%lld calls ran, %lld were refused with a message)\n",
              static_cast<long long>(cases), static_cast<long long>(counts.accepted),
              static_cast<long long>(counts.refused));
  return counts.accepted > 0 && counts.refused > 0 ? 0 : 1;
}
