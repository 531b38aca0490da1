// A libFuzzer target: the bytes say which call of the plain C door is made. Every byte string is some call: sizes that
// agree mostly, with attributes, types, ranks and dimensions overwritten where the bytes say so, and element values
// that are the bytes themselves (NaN and Inf among them). A call is refused with a message or computed; nothing is read
// or written beyond its buffers, and nothing is undefined. The coverage of check.cc is what guides the fuzzer, where
// fuzz_kernels only draws.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "random_call.h"

using namespace qknorm;
using namespace qknorm::testing;

namespace {

// Work that one call may ask for: the fuzzer is to try many of them.
constexpr int64_t kMostElements = 1 << 16;
constexpr int64_t kMostLogits = 1 << 14;

// Reads numbers off the input; behind its end there are zeros.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  uint8_t byte() { return at_ < size_ ? data_[at_++] : uint8_t{0}; }
  bool more() const { return at_ < size_; }
  uint64_t word() {
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value = value << 8 | byte();
    return value;
  }

 private:
  const uint8_t* data_;
  size_t size_;
  size_t at_ = 0;
};

// A number that is wrong in one of the ways that files have: any, tiny, or at the edge of its type.
int64_t any_integer(Bytes& bytes) {
  constexpr int64_t kEdges[] = {INT64_MIN, INT64_MAX, -1, 0, int64_t{1} << 31, int64_t{1} << 40, int64_t{1} << 62};
  switch (bytes.byte() % 3) {
    case 0:
      return static_cast<int64_t>(bytes.word());
    case 1:
      return static_cast<int64_t>(bytes.byte()) - 8;
    default:
      return kEdges[bytes.byte() % std::size(kEdges)];
  }
}

void overwrite_attributes(Bytes& bytes, const spec::AttributeRow* rows, size_t count, void* attributes) {
  for (int changes = bytes.byte() % 4; changes > 0; --changes) {
    const spec::AttributeRow& row = rows[bytes.byte() % count];
    const bool real = row.kind == spec::AttributeKind::kReal;
    const uint64_t word = real ? bytes.word() : static_cast<uint64_t>(any_integer(bytes));
    std::memcpy(static_cast<char*>(attributes) + row.offset, &word, sizeof(word));
  }
}

// Another shape or type for some inputs; the memory is always as large as the new shape says.
void overwrite_inputs(Bytes& bytes, std::vector<Tensor>& inputs) {
  constexpr int64_t kTypes[] = {QKNORM_FLOAT,    QKNORM_DOUBLE, QKNORM_FLOAT16,
                                QKNORM_BFLOAT16, QKNORM_BOOL,   QKNORM_INT64};
  for (int changes = bytes.byte() % 4; changes > 0; --changes) {
    Tensor& tensor = inputs[bytes.byte() % inputs.size()];
    std::vector<int64_t> dims = tensor.given() ? tensor.dims() : std::vector<int64_t>{};
    int64_t dtype = tensor.dtype();
    switch (bytes.byte() % 5) {
      case 0:
        tensor = Tensor();
        continue;
      case 1:
        dtype = kTypes[bytes.byte() % std::size(kTypes)];
        break;
      case 2:
        if (!dims.empty()) dims[bytes.byte() % dims.size()] = bytes.byte() % 12;
        break;
      case 3:
        if (!dims.empty()) dims.pop_back();
        break;
      default:
        if (dims.size() < 6) dims.push_back(bytes.byte() % 4);
        break;
    }
    if (dtype == QKNORM_ABSENT) dtype = QKNORM_FLOAT;
    tensor = Tensor(dtype, std::move(dims));
    tensor.fill(0);
  }
}

void overwrite_elements(Bytes& bytes, std::vector<Tensor>& inputs) {
  while (bytes.more()) {
    Tensor& tensor = inputs[bytes.byte() % inputs.size()];
    if (!tensor.given() || tensor.count() == 0) continue;
    const auto place = static_cast<int64_t>(bytes.word() % static_cast<uint64_t>(tensor.count()));
    const uint64_t bits = bytes.word();
    const int64_t width = value_bytes(tensor.dtype());
    std::memcpy(static_cast<char*>(tensor.data()) + place * width, &bits,
                static_cast<size_t>(std::min<int64_t>(width, 8)));
  }
}

void require_message(int32_t status, const qknorm_message& message) {
  if (status == QKNORM_INVALID_ARGUMENT && std::strlen(message.text) >= 10) return;
  std::fprintf(stderr, "refused with status %d and the message \"%s\"\n", status, message.text);
  std::abort();
}

// Elements of a shape, or -1 where they are more than is tried.
int64_t elements(const int64_t* dims, size_t rank) {
  int64_t count = 1;
  for (size_t i = 0; i < rank; ++i) {
    if (dims[i] < 0 || dims[i] > kMostElements) return -1;
    count *= dims[i];
    if (count > kMostElements) return -1;
  }
  return count;
}

Tensor output(int64_t dtype, const int64_t* dims, size_t rank) {
  return Tensor(dtype, std::vector<int64_t>(dims, dims + rank));
}

void run_attention(Bytes& bytes, Random& random) {
  AttentionCall call = random_attention(random);
  overwrite_attributes(bytes, spec::kAttentionAttributes, std::size(spec::kAttentionAttributes), &call.attributes);
  overwrite_inputs(bytes, call.inputs);
  const bool with_present = bytes.byte() % 2 != 0;
  overwrite_elements(bytes, call.inputs);
  const std::vector<qknorm_tensor> inputs = views(call.inputs);
  qknorm_attention_shapes shapes{};
  qknorm_message message{};
  const int32_t status = qknorm_cpu_attention_shapes(&call.attributes, inputs.data(), &shapes, &message);
  if (status != QKNORM_OK) {
    require_message(status, message);
    return;
  }
  const int64_t logits = shapes.present_key[2] * shapes.y[1];
  if (elements(shapes.y, 3) < 0 || elements(shapes.present_key, 4) < 0 || elements(shapes.present_value, 4) < 0) return;
  if (logits > kMostLogits) return;
  const int64_t dtype = call.inputs[0].dtype();
  Tensor y = output(dtype, shapes.y, 3);
  Tensor key = output(dtype, shapes.present_key, 4);
  Tensor value = output(dtype, shapes.present_value, 4);
  const int32_t run =
      qknorm_cpu_attention(&call.attributes, inputs.data(), y.data(), with_present ? key.data() : nullptr,
                           with_present ? value.data() : nullptr, nullptr, &message);
  if (run != QKNORM_OK) require_message(run, message);  // cache_length is only read now
}

void run_rotary(Bytes& bytes, Random& random) {
  RotaryCall call = random_rotary(random);
  overwrite_attributes(bytes, spec::kRotaryAttributes, std::size(spec::kRotaryAttributes), &call.attributes);
  overwrite_inputs(bytes, call.inputs);
  overwrite_elements(bytes, call.inputs);
  const std::vector<qknorm_tensor> inputs = views(call.inputs);
  const Tensor& x = call.inputs[spec::kRotaryInputX];
  Tensor y = x.given() ? output(x.dtype(), inputs[0].dims, static_cast<size_t>(inputs[0].rank)) : Tensor();
  qknorm_message message{};
  const int32_t status = qknorm_cpu_rotary(&call.attributes, inputs.data(), y.data(), nullptr, &message);
  if (status != QKNORM_OK) require_message(status, message);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const char* const instruction_sets[] = {"portable", "avx2", "avx512"};
  Bytes bytes(data, size);
  qknorm_cpu_select_instruction_set(instruction_sets[bytes.byte() % 3]);  // stays where the processor lacks it
  const bool attention = bytes.byte() % 4 != 0;
  Random random(static_cast<uint64_t>(bytes.byte()) << 8 | bytes.byte());
  if (attention) {
    run_attention(bytes, random);
  } else {
    run_rotary(bytes, random);
  }
  return 0;
}
