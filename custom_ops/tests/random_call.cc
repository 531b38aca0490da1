#include "random_call.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <iterator>
#include <thread>

namespace qknorm::testing {
namespace {

using spec::EpsilonMode;
using spec::NormAxis;
using spec::NormKind;
using spec::RotaryOrder;

uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Truncated, which is close enough for inputs.
uint16_t half_bits(double value) {
  if (std::isnan(value)) return 0x7e00;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (magnitude >= 65504) return static_cast<uint16_t>(sign | (std::isinf(value) ? 0x7c00 : 0x7bff));
  int exponent = 0;
  const double fraction = std::frexp(magnitude, &exponent);  // in [0.5, 1)
  if (magnitude == 0 || exponent < -23) return sign;
  if (exponent < -13) return static_cast<uint16_t>(sign | static_cast<int>(std::ldexp(fraction, exponent + 24)));
  const int bits = static_cast<int>(std::ldexp(fraction, 11)) - 1024;
  return static_cast<uint16_t>(sign | ((exponent + 14) << 10) | bits);
}

double half_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  double magnitude = std::ldexp(exponent == 0 ? fraction : fraction + 1024, (exponent == 0 ? 1 : exponent) - 25);
  if (exponent == 31) magnitude = fraction != 0 ? NAN : INFINITY;
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

struct Sizes {
  int64_t dtype;
  int64_t batch;
  int64_t length;
  int64_t new_keys;
  int64_t q_heads;
  int64_t kv_heads;
  int64_t head_size;
  int64_t value_size;
};

int64_t parameter_type(Random& random, int64_t dtype) { return random.chance(0.5) ? dtype : int64_t{QKNORM_FLOAT}; }

Tensor normal_tensor(Random& random, int64_t dtype, std::vector<int64_t> dims, double mean, double deviation) {
  Tensor tensor(dtype, std::move(dims));
  tensor.fill_normal(random, mean, deviation);
  return tensor;
}

Tensor head_parameter(Random& random, int64_t dtype, int64_t heads, int64_t size, double mean) {
  const std::vector<std::vector<int64_t>> shapes = {{size}, {heads, size}, {heads * size}};
  return normal_tensor(random, parameter_type(random, dtype), shapes[static_cast<size_t>(random.integer(0, 2))], mean,
                       0.5);
}

std::vector<int64_t> broadcastable(Random& random, std::vector<int64_t> dims) {
  for (int64_t& dim : dims) dim = random.chance(0.7) ? dim : 1;
  dims.erase(dims.begin(), dims.begin() + random.integer(0, static_cast<int64_t>(dims.size())));
  return dims;
}

struct NormAndRotary {
  int64_t q_norm = 0;
  int64_t k_norm = 0;
  int64_t norm_axis = 0;
  int64_t norm_groups = 1;
  double q_epsilon = 0;
  double k_epsilon = 0;
  int64_t epsilon_mode = 0;
  int64_t norm_weight_order = 0;
  int64_t rotary_order = 0;
  int64_t rotary_interleaved = 0;
  int64_t rotary_embedding_dim = 0;
  int64_t rotary_offset = 0;
  int64_t rotary_sections = 1;
};

// Kinds are drawn by number below: those before the last may have their epsilon under the root.
static_assert(std::size(spec::kAttentionQNormChoices) == 4, "draw the new kind of norm in random_preparation, too");

NormAndRotary random_preparation(Random& random, int64_t head_size) {
  NormAndRotary a;
  a.epsilon_mode = random.integer(0, 2);
  const bool inside = static_cast<EpsilonMode>(a.epsilon_mode) == EpsilonMode::kInsideSqrt;
  a.q_norm = random.integer(0, inside ? 2 : 3);
  a.k_norm = random.integer(0, inside ? 2 : 3);
  a.norm_axis = random.integer(0, 1);
  a.norm_groups = head_size % 2 == 0 && random.chance(0.3) ? 2 : 1;
  a.q_epsilon = random.chance(0.3) ? 0 : 1e-6;
  a.k_epsilon = random.chance(0.3) ? 0 : 1e-5;
  a.norm_weight_order = random.integer(0, 1);
  if (head_size >= 2 && random.chance(0.7)) {
    const bool may_precede = (a.q_norm != 0 || a.k_norm != 0) && a.norm_axis == 0;
    a.rotary_order = may_precede ? random.integer(1, 2) : 1;
    a.rotary_interleaved = random.integer(0, 1);
    a.rotary_sections = head_size >= 4 && random.chance(0.3) ? 2 : 1;
    const int64_t unit = 2 * a.rotary_sections;
    a.rotary_embedding_dim = unit * random.integer(1, head_size / unit);
    a.rotary_offset = random.integer(0, head_size - a.rotary_embedding_dim);
  }
  return a;
}

void add_tables(Random& random, const NormAndRotary& a, const Sizes& s, int64_t heads, Tensor& cos, Tensor& sin) {
  if (a.rotary_order == 0) return;
  const int64_t width = random.chance(0.5) ? a.rotary_embedding_dim : a.rotary_embedding_dim / 2;
  const std::vector<std::vector<int64_t>> shapes = {{s.length, width},
                                                    {s.batch, s.length, width},
                                                    {1, s.length, width},
                                                    {s.batch, heads, s.length, width},
                                                    {1, 1, s.length, width}};
  const std::vector<int64_t>& shape = shapes[static_cast<size_t>(random.integer(0, 4))];
  cos = normal_tensor(random, parameter_type(random, s.dtype), shape, 0, 0.7);
  sin = normal_tensor(random, parameter_type(random, s.dtype), shape, 0, 0.7);
}

// Returns the number of key positions T.
int64_t add_cache(Random& random, const Sizes& s, std::vector<Tensor>& inputs) {
  const int64_t kind = random.integer(0, 3);  // none, growing, fixed size, query offset
  if (kind == 3) {
    Tensor& offset = inputs[spec::kAttentionInputQueryOffset] = Tensor(QKNORM_INT64, {s.batch});
    const std::vector<int64_t> offsets = {0, 5, -3, INT64_MAX, INT64_MIN};
    for (int64_t i = 0; i < s.batch; ++i) {
      const int64_t value = random.pick(offsets);
      std::memcpy(static_cast<char*>(offset.data()) + 8 * i, &value, 8);
    }
  }
  if (kind == 0 || kind == 3) return s.new_keys;
  const int64_t past = random.pick({0, 1, 7, 130, 300});
  const int64_t rows = kind == 2 ? past + random.pick({0, s.new_keys / 2, s.new_keys, s.new_keys + 3}) : past;
  inputs[spec::kAttentionInputPastKey] = normal_tensor(random, s.dtype, {s.batch, s.kv_heads, rows, s.head_size}, 0, 1);
  inputs[spec::kAttentionInputPastValue] =
      normal_tensor(random, s.dtype, {s.batch, s.kv_heads, rows, s.value_size}, 0, 1);
  if (kind == 1) return past + s.new_keys;
  Tensor& length = inputs[spec::kAttentionInputCacheLength] = Tensor(QKNORM_INT64, {s.batch});
  int64_t total = rows;
  for (int64_t i = 0; i < s.batch; ++i) {
    const int64_t value = random.integer(0, past);
    std::memcpy(static_cast<char*>(length.data()) + 8 * i, &value, 8);
    total = std::max(total, value + s.new_keys);
  }
  return total;
}

void add_bias(Random& random, const Sizes& s, int64_t total, std::vector<Tensor>& inputs) {
  if (random.chance(0.5)) return;
  std::vector<int64_t> dims = broadcastable(random, {s.batch, s.q_heads, s.length, total});
  if (inputs[spec::kAttentionInputCacheLength].given() && !dims.empty() && random.chance(0.5)) {
    dims.back() = random.integer(std::min<int64_t>(1, dims.back()), dims.back());
  }
  Tensor& bias = inputs[spec::kAttentionInputAttentionBias];
  if (random.chance(0.5)) {
    bias = Tensor(QKNORM_BOOL, dims);
    for (int64_t i = 0; i < bias.count(); ++i) bias.set(i, random.chance(0.8) ? 1 : 0);
  } else {
    bias = normal_tensor(random, parameter_type(random, s.dtype), dims, 0, 1);
    for (int64_t i = 0; i < bias.count(); ++i) {
      if (random.chance(0.1)) bias.set(i, -INFINITY);
    }
  }
}

}  // namespace

int64_t value_bytes(int64_t dtype) {
  switch (dtype) {
    case QKNORM_BOOL:
      return 1;
    case QKNORM_FLOAT16:
    case QKNORM_BFLOAT16:
      return 2;
    case QKNORM_FLOAT:
      return 4;
    default:
      return 8;
  }
}

uint64_t encode(int64_t dtype, double value) {
  switch (dtype) {
    case QKNORM_BOOL:
      return value != 0 ? 1 : 0;
    case QKNORM_FLOAT16:
      return half_bits(value);
    case QKNORM_BFLOAT16:
      return float_bits(static_cast<float>(value)) >> 16;
    case QKNORM_FLOAT:
      return float_bits(static_cast<float>(value));
    case QKNORM_DOUBLE: {
      uint64_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      return bits;
    }
    default:
      return static_cast<uint64_t>(std::isnan(value) ? 0 : static_cast<int64_t>(value));
  }
}

double decode(int64_t dtype, const void* data, int64_t i) {
  uint64_t bits = 0;
  const auto bytes = static_cast<size_t>(value_bytes(dtype));
  std::memcpy(&bits, static_cast<const char*>(data) + static_cast<size_t>(i) * bytes, bytes);
  if (dtype == QKNORM_FLOAT16) return half_value(static_cast<uint16_t>(bits));
  if (dtype == QKNORM_DOUBLE) {
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  if (dtype != QKNORM_FLOAT && dtype != QKNORM_BFLOAT16) return static_cast<double>(bits);
  const auto word = static_cast<uint32_t>(dtype == QKNORM_BFLOAT16 ? bits << 16 : bits);
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

Tensor::Tensor(int64_t dtype, std::vector<int64_t> dims) : dtype_(dtype), dims_(std::move(dims)) {
  data_ = std::make_unique<char[]>(static_cast<size_t>(count() * value_bytes(dtype)));
}

int64_t Tensor::count() const {
  int64_t product = 1;
  for (const int64_t dim : dims_) product *= dim;
  return product;
}

void Tensor::set(int64_t i, double value) {
  const uint64_t bits = encode(dtype_, value);
  const auto bytes = static_cast<size_t>(value_bytes(dtype_));
  std::memcpy(data_.get() + static_cast<size_t>(i) * bytes, &bits, bytes);
}

void Tensor::fill_normal(Random& random, double mean, double deviation) {
  for (int64_t i = 0; i < count(); ++i) set(i, mean + deviation * random.normal());
}

void Tensor::fill(double value) {
  for (int64_t i = 0; i < count(); ++i) set(i, value);
}

qknorm_tensor Tensor::view() const {
  if (!given()) return {};
  return {data_.get(), dims_.data(), static_cast<int64_t>(dims_.size()), dtype_};
}

std::vector<qknorm_tensor> views(const std::vector<Tensor>& inputs) {
  std::vector<qknorm_tensor> out;
  for (const Tensor& tensor : inputs) out.push_back(tensor.view());
  return out;
}

AttentionCall random_attention(Random& random) {
  AttentionCall call;
  Sizes s{};
  s.dtype = random.pick({QKNORM_FLOAT, QKNORM_DOUBLE, QKNORM_FLOAT16, QKNORM_BFLOAT16});
  s.batch = random.chance(0.05) ? 0 : random.integer(1, 2);
  s.length = random.pick({0, 1, 1, 2, 3, 5, 17, 40});
  s.kv_heads = random.integer(1, 2);
  s.q_heads = s.kv_heads * random.pick({1, 2, 3, 5});
  s.head_size = random.pick({1, 2, 3, 8, 15, 16, 36, 64, 65});
  s.value_size = random.chance(0.6) ? s.head_size : random.pick({1, 7, 16, 33});
  const NormAndRotary a = random_preparation(random, s.head_size);
  s.new_keys = a.rotary_order != 0 || random.chance(0.6) ? s.length : random.pick({0, 1, 9, 150});
  call.attributes = {s.q_heads,
                     s.kv_heads,
                     0.3,
                     random.chance(0.2) ? 2.0 : 0.0,
                     random.chance(0.2) ? 1.5 : 0.0,
                     random.integer(0, 1),
                     random.pick({-1, -1, 0, 4}),
                     random.pick({-1, -1, 0, 3}),
                     random.integer(0, 3),
                     a.q_norm,
                     a.k_norm,
                     a.norm_axis,
                     a.norm_groups,
                     a.q_epsilon,
                     a.k_epsilon,
                     a.epsilon_mode,
                     a.norm_weight_order,
                     a.rotary_order,
                     a.rotary_interleaved,
                     a.rotary_embedding_dim,
                     a.rotary_offset,
                     a.rotary_sections};
  auto& in = call.inputs;
  in[spec::kAttentionInputQuery] = normal_tensor(random, s.dtype, {s.batch, s.length, s.q_heads * s.head_size}, 0, 1);
  in[spec::kAttentionInputKey] = normal_tensor(random, s.dtype, {s.batch, s.new_keys, s.kv_heads * s.head_size}, 0, 1);
  in[spec::kAttentionInputValue] =
      normal_tensor(random, s.dtype, {s.batch, s.new_keys, s.kv_heads * s.value_size}, 0, 1);
  if (a.q_norm != 0 && random.chance(0.7)) {
    in[spec::kAttentionInputQNormWeight] = head_parameter(random, s.dtype, s.q_heads, s.head_size, 1);
    in[spec::kAttentionInputQNormBias] = head_parameter(random, s.dtype, s.q_heads, s.head_size, 0);
  }
  if (a.k_norm != 0 && random.chance(0.7)) {
    in[spec::kAttentionInputKNormWeight] = head_parameter(random, s.dtype, s.kv_heads, s.head_size, 1);
  }
  add_tables(random, a, s, s.q_heads == s.kv_heads ? s.q_heads : 1, in[spec::kAttentionInputCos],
             in[spec::kAttentionInputSin]);
  if (random.chance(0.3)) {
    in[spec::kAttentionInputQScale] =
        normal_tensor(random, parameter_type(random, s.dtype),
                      broadcastable(random, {s.batch, s.q_heads, s.length, s.head_size}), 1, 0.2);
  }
  if (random.chance(0.2)) {
    in[spec::kAttentionInputHeadSink] = normal_tensor(random, parameter_type(random, s.dtype), {s.q_heads}, 0, 1);
  }
  add_bias(random, s, add_cache(random, s, in), in);
  return call;
}

RotaryCall random_rotary(Random& random) {
  RotaryCall call;
  Sizes s{};
  s.dtype = random.pick({QKNORM_FLOAT, QKNORM_DOUBLE, QKNORM_FLOAT16, QKNORM_BFLOAT16});
  s.batch = random.integer(0, 2);
  s.length = random.pick({0, 1, 5, 19});
  s.q_heads = random.integer(1, 4);
  s.head_size = random.pick({1, 2, 3, 8, 15, 16, 36, 65});
  const NormAndRotary a = random_preparation(random, s.head_size);
  call.attributes = {s.q_heads,
                     a.q_norm,
                     a.q_epsilon,
                     a.norm_axis,
                     a.norm_groups,
                     a.epsilon_mode,
                     a.norm_weight_order,
                     a.rotary_order,
                     a.rotary_interleaved,
                     a.rotary_embedding_dim,
                     a.rotary_offset,
                     a.rotary_sections};
  auto& in = call.inputs;
  in[spec::kRotaryInputX] = normal_tensor(random, s.dtype, {s.batch, s.length, s.q_heads * s.head_size}, 0, 1);
  if (a.q_norm != 0 && random.chance(0.7)) {
    in[spec::kRotaryInputWeight] = head_parameter(random, s.dtype, s.q_heads, s.head_size, 1);
  }
  add_tables(random, a, s, s.q_heads, in[spec::kRotaryInputCos], in[spec::kRotaryInputSin]);
  return call;
}

void break_call(Random& random, const spec::AttributeRow* rows, size_t row_count, void* attributes,
                std::vector<Tensor>& inputs) {
  Tensor& tensor = inputs[static_cast<size_t>(random.integer(0, static_cast<int64_t>(inputs.size()) - 1))];
  const std::vector<int64_t> types = {
      QKNORM_FLOAT, QKNORM_DOUBLE, QKNORM_FLOAT16, QKNORM_BFLOAT16, QKNORM_BOOL, QKNORM_INT64, 3};
  const std::vector<int64_t> odd = {-1, 0, 1, 2, 3, 7, 1000, INT64_MAX, INT64_MIN};
  switch (random.integer(0, 5)) {
    case 0: {  // an attribute
      const spec::AttributeRow& row = rows[static_cast<size_t>(random.integer(0, static_cast<int64_t>(row_count) - 1))];
      char* field = static_cast<char*>(attributes) + row.offset;
      const int64_t number = random.pick(odd);
      const std::vector<double> reals = {-1.0, 0.0, 1e30, NAN, INFINITY, 0.5};
      const double real = reals[static_cast<size_t>(random.integer(0, 5))];
      std::memcpy(field, row.kind == spec::AttributeKind::kReal ? static_cast<const void*>(&real) : &number, 8);
      break;
    }
    case 1:  // a missing input
      tensor = Tensor();
      break;
    case 2: {  // another rank
      std::vector<int64_t> dims = tensor.dims();
      if (dims.empty() || random.chance(0.5)) {
        dims.insert(dims.begin(), random.integer(1, 2));
      } else {
        dims.pop_back();
      }
      if (tensor.given()) tensor = normal_tensor(random, tensor.dtype(), dims, 0, 1);
      break;
    }
    case 3: {  // another type
      const int64_t type = random.pick(types);
      if (tensor.given()) tensor = normal_tensor(random, type, tensor.dims(), 0, 1);
      break;
    }
    case 4: {  // another size
      std::vector<int64_t> dims = tensor.dims();
      if (dims.empty()) return;
      dims[static_cast<size_t>(random.integer(0, static_cast<int64_t>(dims.size()) - 1))] = random.integer(0, 9);
      tensor = normal_tensor(random, tensor.dtype(), dims, 0, 1);
      break;
    }
    default: {  // an input that should not be there
      const int64_t type = random.pick(types);
      tensor = normal_tensor(random, type, {random.integer(0, 3), random.integer(1, 3)}, 0, 1);
    }
  }
}

ThreadExecutor::ThreadExecutor(int64_t threads) {
  executor_.context = &executor_.threads;
  executor_.threads = threads;
  executor_.parallel_for = [](void* context, int64_t count, void (*task)(void*, int64_t), void* argument) {
    std::atomic<int64_t> next{0};
    std::vector<std::thread> workers;
    for (int64_t t = 0; t < *static_cast<int64_t*>(context); ++t) {
      workers.emplace_back([&] {
        for (int64_t i = next++; i < count; i = next++) task(argument, i);
      });
    }
    for (std::thread& worker : workers) worker.join();
  };
  executor_.allocate = [](void*, size_t bytes) { return static_cast<void*>(new char[bytes]); };
  executor_.release = [](void*, void* memory) { delete[] static_cast<char*>(memory); };
}

}  // namespace qknorm::testing
