#include "ort/cuda_attention.h"

#include <algorithm>
#include <array>

#include "kernels/cpu/check.h"
#include "kernels/cpu/meaning.h"

namespace qknorm::cuda {
namespace {

constexpr int64_t kLargestHead = 256;
constexpr int64_t kHeadsOfDecode = 16;
constexpr int64_t kFewestKeysOfASplit = 256;
constexpr int64_t kMostSplits = 128;
constexpr int64_t kProgramsPerProcessor = 3;  // of decode, by its registers and shared memory

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

void require_empty(const std::string& message) { require(message.empty(), message); }

// Workspace of one call, given back at its end; the stream orders what comes after.
class Workspace {
 public:
  explicit Workspace(const Memory& memory) : memory_(memory) {}
  ~Workspace() {
    for (void* block : blocks_) memory_.release(memory_.context, block);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* take(int64_t bytes) {
    void* block = memory_.allocate(memory_.context, static_cast<size_t>(std::max<int64_t>(bytes, 16)));
    if (block == nullptr)
      throw std::runtime_error("no device memory for " + std::to_string(bytes) + " bytes of workspace");
    blocks_.push_back(block);
    return block;
  }

 private:
  Memory memory_;
  std::vector<void*> blocks_;
};

int64_t bytes_of(int32_t dtype) { return dtype == QKNORM_FLOAT ? 4 : 2; }

int64_t padded_head(int64_t size) {
  int64_t padded = 16;
  while (padded < size) padded *= 2;
  return padded;
}

int64_t divided_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

bool is_plain(const PreparationPlan& plan) {
  return !normalises(plan.kind) && !rotates(plan.rotary.order) && plan.scale.dtype == QKNORM_ABSENT;
}

// The kernels take one set of strides for both tables.
void check_tables(const RotaryPlan& rotary) {
  if (!rotates(rotary.order)) return;
  require(
      rotary.cos.dtype == rotary.sin.dtype && std::equal(rotary.cos.stride, rotary.cos.stride + 4, rotary.sin.stride),
      "cos and sin must have the same type and shape for the CUDA kernels");
}

// One call: what all its launches share.
class Call {
 public:
  explicit Call(const Target& target) : target_(target), context_(target.stream), workspace_(target.memory) {}

  void* take(int64_t bytes) { return workspace_.take(bytes); }
  const DeviceFacts& device() const { return context_.device(); }

  const Image& choose(const Features& wanted, const Arguments& arguments) const {
    return target_.pack->choose(wanted, arguments, device());
  }

  void launch(const Image& image, const Arguments& arguments, int64_t x, int64_t y, int64_t z) {
    if (x == 0 || y == 0 || z == 0) return;
    require(x < (int64_t{1} << 31) && y <= 65535 && z <= 65535,
            "a CUDA grid takes at most 65535 heads and batch entries");
    const uint32_t grid[3] = {static_cast<uint32_t>(x), static_cast<uint32_t>(y), static_cast<uint32_t>(z)};
    target_.pack->launch(image, arguments, grid, context_.context(), target_.stream);
  }

  // `height` rows of `width` bytes.
  void copy(const void* from, int64_t from_pitch, void* to, int64_t to_pitch, int64_t width, int64_t height) const {
    if (width == 0 || height == 0) return;
    Copy2D copy{};
    copy.source_type = copy.target_type = kDeviceMemory;
    copy.source = reinterpret_cast<DevicePointer>(from);
    copy.source_pitch = static_cast<size_t>(from_pitch);
    copy.target = reinterpret_cast<DevicePointer>(to);
    copy.target_pitch = static_cast<size_t>(to_pitch);
    copy.width = static_cast<size_t>(width);
    copy.height = static_cast<size_t>(height);
    driver().check(driver().copy_2d(&copy, target_.stream), "cuMemcpy2DAsync of the cache");
  }

  // Statistics of long rows and groups; NULL where each head has its own.
  Statistics statistics(const PreparationPlan& plan, int32_t dtype) {
    if (!needs_statistics(plan)) return {nullptr};
    const int64_t groups = plan.num_heads * plan.head_size / group_size(plan);
    void* out = take(plan.batch * plan.length * groups * 3 * 4);
    Arguments arguments;
    arguments.side(plan, {nullptr});
    arguments.pointer(out);
    arguments.integer(plan.length);
    const Features wanted = {KernelKind::kRowStatistics, dtype, 0, false, false, false, false};
    launch(choose(wanted, arguments), arguments, plan.length, groups, plan.batch);
    return {out};
  }

 private:
  const Target& target_;
  ContextOfStream context_;
  Workspace workspace_;
};

// Where keys and values lie for the attention, and whether the prologue must write them there.
struct KeyBuffers {
  Rows keys;
  Rows values;
  bool write_keys;
  bool write_values;
};

class Attention {
 public:
  Attention(const AttentionProblem& problem, const int64_t* cache_length, Call& call)
      : p_(problem),
        cache_length_(cache_length),
        call_(call),
        padded_(padded_head(std::max(p_.head_size, p_.value_size))) {}

  void run() {
    if (p_.batch == 0 || (p_.num_queries == 0 && p_.num_new_keys == 0 && p_.total_rows == 0)) return;
    if (is_decode()) {
      decode(key_buffers(true));
      return;
    }
    const KeyBuffers buffers = key_buffers(false);
    prefill(buffers, prepare(buffers));
  }

 private:
  bool is_decode() const {
    return p_.num_queries == 1 && p_.num_new_keys == 1 && p_.query_offset == nullptr && !needs_statistics(p_.query) &&
           !needs_statistics(p_.key) && p_.q_heads / p_.kv_heads <= kHeadsOfDecode;
  }

  Features features(KernelKind kernel) const {
    Features f{};
    f.kernel = kernel;
    f.dtype = p_.dtype;
    f.padded = padded_;
    return f;
  }

  Features attention_features(KernelKind kernel) const {
    Features f = features(kernel);
    f.capped = p_.softcap > 0 || p_.logit_clamp > 0;
    f.masked = p_.bias.dtype != QKNORM_ABSENT;
    return f;
  }

  // The buffer of all keys or values: the present one, or workspace where nobody asked for it; the past is copied to
  // it.
  Rows buffer(const void* past, void* present, int64_t size) {
    const int64_t row = size * bytes_of(p_.dtype);
    const int64_t heads = p_.batch * p_.kv_heads;
    if (present == nullptr) present = call_.take(heads * p_.total_rows * row);
    if (past != nullptr && past != present) {
      call_.copy(past, p_.past_rows * row, present, p_.total_rows * row, p_.past_rows * row, heads);
    }
    return rows_of_heads(present, p_.total_rows, p_.kv_heads, size);
  }

  KeyBuffers key_buffers(bool always) {
    const bool kept = always || p_.past_key != nullptr || p_.present_key != nullptr || p_.present_value != nullptr;
    if (kept) {
      return {buffer(p_.past_key, p_.present_key, p_.head_size), buffer(p_.past_value, p_.present_value, p_.value_size),
              true, true};
    }
    KeyBuffers out{};
    out.values = rows_of_projection(p_.value, p_.num_new_keys, p_.kv_heads, p_.value_size);
    out.write_keys = !is_plain(p_.key);
    out.keys = out.write_keys ? buffer(nullptr, nullptr, p_.head_size)
                              : rows_of_projection(p_.key.x, p_.num_new_keys, p_.kv_heads, p_.head_size);
    return out;
  }

  Rows prepare(const KeyBuffers& buffers) {
    Rows query = rows_of_projection(p_.query.x, p_.num_queries, p_.q_heads, p_.head_size);
    const bool write_query = !is_plain(p_.query);
    if (write_query) {
      void* out = call_.take(p_.batch * p_.num_queries * p_.q_heads * p_.head_size * bytes_of(p_.dtype));
      query = rows_of_heads(out, p_.num_queries, p_.q_heads, p_.head_size);
    }
    const int64_t kv_kinds = (buffers.write_keys ? 1 : 0) + (buffers.write_values ? 1 : 0);
    const int64_t q_heads = write_query ? p_.q_heads : 0;
    const int64_t longest = std::max(write_query ? p_.num_queries : 0, kv_kinds > 0 ? p_.num_new_keys : 0);
    if (longest == 0) return query;
    Features wanted = features(KernelKind::kPrepare);
    wanted.interleaved = rotates(p_.query.rotary.order) && p_.query.rotary.interleaved;
    wanted.statistics = needs_statistics(p_.query) || needs_statistics(p_.key);
    Arguments a;
    a.side(p_.query, call_.statistics(p_.query, p_.dtype));
    a.side(p_.key, call_.statistics(p_.key, p_.dtype));
    a.rows(rows_of_projection(p_.value, p_.num_new_keys, p_.kv_heads, p_.value_size));
    a.rotary(p_.query.rotary);
    a.rows(query);
    a.rows(buffers.keys);
    a.rows(buffers.values);
    a.positions(p_, cache_length_);
    for (const int64_t size : {p_.num_queries, q_heads, p_.kv_heads, p_.head_size, p_.value_size}) a.integer(size);
    const Image& image = call_.choose(wanted, a);
    call_.launch(image, a, divided_up(longest, image.rows), q_heads + kv_kinds * p_.kv_heads, p_.batch);
    return query;
  }

  void prefill(const KeyBuffers& buffers, const Rows& query) {
    if (p_.num_queries == 0) return;
    Arguments a;
    a.rows(query);
    a.rows(buffers.keys);
    a.rows(buffers.values);
    a.rows(rows_of_projection(p_.y, p_.num_queries, p_.q_heads, p_.value_size));
    a.mask(p_);
    a.logits(p_);
    a.positions(p_, cache_length_);
    for (const int64_t size : {p_.num_queries, p_.q_heads / p_.kv_heads, p_.head_size, p_.value_size}) a.integer(size);
    const Image& image = call_.choose(attention_features(KernelKind::kPrefill), a);
    call_.launch(image, a, divided_up(p_.num_queries, image.rows), p_.q_heads, p_.batch);
  }

  int64_t splits() const {
    const int64_t wanted = divided_up(kProgramsPerProcessor * call_.device().multiprocessors, p_.batch * p_.kv_heads);
    return std::max<int64_t>(1, std::min({wanted, p_.total_rows / kFewestKeysOfASplit, kMostSplits}));
  }

  void decode(const KeyBuffers& buffers) {
    const int64_t count = splits();
    const Rows out = rows_of_projection(p_.y, 1, p_.q_heads, p_.value_size);
    const int64_t partials = count > 1 ? p_.batch * p_.q_heads * count : 0;
    void* partial = call_.take(partials * kLargestHead * 4);
    void* state = call_.take(partials * 2 * 4);
    Arguments a;
    a.side(p_.query, {nullptr});
    a.side(p_.key, {nullptr});
    a.rows(rows_of_projection(p_.value, 1, p_.kv_heads, p_.value_size));
    a.rotary(p_.query.rotary);
    a.rows(buffers.keys);
    a.rows(buffers.values);
    a.rows(out);
    a.pointer(partial);
    a.pointer(state);
    a.mask(p_);
    a.logits(p_);
    a.positions(p_, cache_length_);
    for (const int64_t size : {p_.q_heads / p_.kv_heads, p_.head_size, p_.value_size}) a.integer(size);
    Features wanted = attention_features(KernelKind::kDecode);
    wanted.interleaved = rotates(p_.query.rotary.order) && p_.query.rotary.interleaved;
    const Image& image = call_.choose(wanted, a);
    call_.launch(image, a, count, p_.kv_heads, p_.batch);
    if (count > 1) combine(image, partial, state, out, count);
  }

  void combine(const Image& decoded, void* partial, void* state, const Rows& out, int64_t count) {
    Arguments a;
    a.pointer(partial);
    a.pointer(state);
    a.rows(out);
    a.logits(p_);
    a.integer(count);
    a.integer(p_.value_size);
    Features wanted = features(KernelKind::kCombine);
    wanted.padded = decoded.features.padded;
    call_.launch(call_.choose(wanted, a), a, p_.q_heads, p_.batch, 1);
  }

  const AttentionProblem& p_;
  const int64_t* cache_length_;
  Call& call_;
  int64_t padded_;
};

// The checks read cache_length on the host: they are given zeros, which fit wherever any length does.
AttentionProblem checked_problem(const spec::AttentionAttributes& attributes, const qknorm_tensor* inputs,
                                 std::array<qknorm_tensor, spec::kAttentionInputCount>* copied,
                                 std::vector<int64_t>* zeros) {
  std::copy(inputs, inputs + spec::kAttentionInputCount, copied->begin());
  qknorm_tensor& lengths = (*copied)[spec::kAttentionInputCacheLength];
  if (lengths.dtype != QKNORM_ABSENT && lengths.rank == 1) {
    zeros->assign(static_cast<size_t>(std::max<int64_t>(lengths.dims[0], 1)), 0);
    lengths.data = zeros->data();
  }
  AttentionProblem problem;
  require_empty(make_attention_problem(attributes, copied->data(), &problem));
  return problem;
}

std::string refuse_rotary(spec::RotaryOrder order, int64_t interleaved, int64_t offset, int64_t groups) {
  if (rotates(order) && interleaved != 0 && offset % 2 != 0) {
    return "interleaved rotary pairs from the odd offset " + std::to_string(offset) + " have no CUDA kernel";
  }
  if (rotates_before_norm(order) && groups > 1) {
    return "norm_groups of a head that is rotated before its norm have no CUDA kernel";
  }
  return "";
}

template <class Attributes>
spec::RotaryOrder order_of(const Attributes& checked) {
  return static_cast<spec::RotaryOrder>(checked.rotary_order);
}

// Why a kind of norm has no CUDA kernel; one that has none is refused here, in the words of spec/cuda_support.py.
std::string refuse_norm(int64_t checked) {
  switch (static_cast<spec::NormKind>(checked)) {
    case spec::NormKind::kNone:
    case spec::NormKind::kRms:
    case spec::NormKind::kLayer:
    case spec::NormKind::kL2:
      return "";
  }
  return "this kind of norm has no CUDA kernel";
}

std::string refuse_dtype(int64_t dtype) {
  return dtype == QKNORM_DOUBLE ? "the CUDA kernels compute in float32: float64 has none" : "";
}

void check_head(int64_t size) {
  require(size <= kLargestHead, "a head of " + std::to_string(size) +
                                    " values has no CUDA kernel: " + std::to_string(kLargestHead) + " is the largest");
}

}  // namespace

std::string refusal(const spec::AttentionAttributes& a, int64_t dtype) {
  std::string reason = check_attributes(a);
  if (reason.empty()) reason = refuse_dtype(dtype);
  if (reason.empty() && needs_float64(static_cast<spec::SoftmaxPrecision>(a.softmax_precision))) {
    reason = "the CUDA kernels compute the softmax in float32: softmax_precision 'float64' has none";
  }
  if (reason.empty()) reason = refuse_norm(a.q_norm);
  if (reason.empty()) reason = refuse_norm(a.k_norm);
  return reason.empty() ? refuse_rotary(order_of(a), a.rotary_interleaved, a.rotary_offset, a.norm_groups) : reason;
}

std::string refusal(const spec::RotaryAttributes& a, int64_t dtype) {
  std::string reason = check_attributes(a);
  if (reason.empty()) reason = refuse_dtype(dtype);
  if (reason.empty()) reason = refuse_norm(a.norm);
  return reason.empty() ? refuse_rotary(order_of(a), a.rotary_interleaved, a.rotary_offset, a.norm_groups) : reason;
}

qknorm_attention_shapes attention_shapes(const spec::AttentionAttributes& attributes, const qknorm_tensor* inputs) {
  std::array<qknorm_tensor, spec::kAttentionInputCount> copied{};
  std::vector<int64_t> zeros;
  const AttentionProblem p = checked_problem(attributes, inputs, &copied, &zeros);
  return {{p.batch, p.num_queries, p.q_heads * p.value_size},
          {p.batch, p.kv_heads, p.total_rows, p.head_size},
          {p.batch, p.kv_heads, p.total_rows, p.value_size}};
}

void run_attention(const spec::AttentionAttributes& attributes, const qknorm_tensor* inputs, void* y, void* present_key,
                   void* present_value, const Target& target) {
  std::array<qknorm_tensor, spec::kAttentionInputCount> copied{};
  std::vector<int64_t> zeros;
  AttentionProblem problem = checked_problem(attributes, inputs, &copied, &zeros);
  require_empty(refusal(attributes, problem.dtype));
  check_head(std::max(problem.head_size, problem.value_size));
  check_tables(problem.query.rotary);
  problem.y = y;
  problem.present_key = present_key;
  problem.present_value = present_value;
  Call call(target);
  const auto* lengths = static_cast<const int64_t*>(inputs[spec::kAttentionInputCacheLength].data);
  Attention(problem, lengths, call).run();
}

void run_rotary(const spec::RotaryAttributes& attributes, const qknorm_tensor* inputs, void* y, const Target& target) {
  RotaryProblem problem;
  require_empty(make_rotary_problem(attributes, inputs, &problem));
  const PreparationPlan& plan = problem.preparation;
  require_empty(refusal(attributes, plan.dtype));
  check_head(plan.head_size);
  check_tables(plan.rotary);
  if (plan.batch == 0 || plan.length == 0) return;
  Call call(target);
  Arguments a;
  const Statistics statistics = call.statistics(plan, plan.dtype);
  const Rows x = rows_of_projection(plan.x, plan.length, plan.num_heads, plan.head_size);
  a.side(plan, statistics);
  a.side(plan, statistics);
  a.rows(x);
  a.rotary(plan.rotary);
  a.rows(rows_of_projection(y, plan.length, plan.num_heads, plan.head_size));
  a.rows(x);
  a.rows(x);
  a.no_positions(plan.length);
  for (const int64_t size : {plan.length, plan.num_heads, int64_t{0}, plan.head_size, plan.head_size}) a.integer(size);
  Features wanted{};
  wanted.kernel = KernelKind::kPrepare;
  wanted.dtype = plan.dtype;
  wanted.padded = padded_head(plan.head_size);
  wanted.interleaved = rotates(plan.rotary.order) && plan.rotary.interleaved;
  wanted.statistics = needs_statistics(plan);
  const Image& image = call.choose(wanted, a);
  call.launch(image, a, divided_up(plan.length, image.rows), plan.num_heads, plan.batch);
}

}  // namespace qknorm::cuda
