// Attention of many queries: keys and values are packed once, then blocks of queries run over them.
#pragma once

#include "kernels/cpu/isa/query_block.h"

namespace qknorm {
namespace QKNORM_ISA {

// Packed panels of at most this many bytes exist at a time (but of one pair at least).
inline constexpr int64_t kWaveBytes = int64_t{64} << 20;
// Panels of one pair that stay in the second-level cache: such a pair is packed and used by one worker.
inline constexpr int64_t kCachedPairBytes = int64_t{1} << 20;

template <class C>
class Prefill {
 public:
  Prefill(const AttentionProblem& problem, Runtime& runtime, const Preparation<C>& queries, const Preparation<C>& keys)
      : p_(problem),
        runtime_(runtime),
        logits_(problem),
        panels_(problem, keys),
        blocks_(problem, queries, panels_, logits_) {
    rows_ = p_.num_queries * (p_.q_heads / p_.kv_heads);
    blocks_per_pair_ = ceil_div(rows_, kBlockRows);
  }

  void run() {
    const int64_t pairs = p_.batch * p_.kv_heads;
    const int64_t pair_bytes = panels_.elements() * static_cast<int64_t>(sizeof(C));
    if (pair_bytes <= kCachedPairBytes && pairs >= 4 * runtime_.threads()) {
      run_pair_by_pair(pairs);
      return;
    }
    const int64_t wave = larger(kWaveBytes / larger(pair_bytes, int64_t{1}), int64_t{1});
    for (int64_t first = 0; first < pairs && !runtime_.failed(); first += wave) {
      run_wave(first, smaller(wave, pairs - first));
    }
  }

 private:
  static constexpr int64_t kBlockRows = kMaxStrips<C> * Tile<C>::kColumns;
  static constexpr int64_t kKeys = Tile<C>::kKeys;

  int64_t worker_elements() const { return larger(panels_.scratch_size(), blocks_.scratch_size()); }

  void run_pair_by_pair(int64_t pairs) {
    parallel(runtime_, pairs, [&](int64_t pair) {
      Borrowed<C> memory(runtime_, panels_.elements() + worker_elements());
      if (memory.data() == nullptr) return;
      C* scratch = memory.data() + panels_.elements();
      for (int64_t tile = 0; tile < p_.longest_row; tile += kKeys) pack(pair, tile, scratch, memory.data());
      for (int64_t i = 0; i < blocks_per_pair_; ++i) attend(pair, i, scratch, memory.data());
    });
  }

  void run_wave(int64_t first_pair, int64_t pairs) {
    const size_t mark = runtime_.mark();
    C* panels = allocate<C>(runtime_, pairs * panels_.elements());
    if (panels == nullptr) return;
    const int64_t tiles = ceil_div(p_.longest_row, kKeys);
    parallel(runtime_, pairs * tiles, [&](int64_t task) {
      Borrowed<C> scratch(runtime_, worker_elements());
      if (scratch.data() == nullptr) return;
      const int64_t pair = task / tiles;
      pack(first_pair + pair, task % tiles * kKeys, scratch.data(), panels + pair * panels_.elements());
    });
    if (!runtime_.failed()) {
      // The last queries of a causal prompt see most keys: they come first.
      parallel(runtime_, pairs * blocks_per_pair_, [&](int64_t task) {
        Borrowed<C> scratch(runtime_, worker_elements());
        if (scratch.data() == nullptr) return;
        const int64_t pair = task % pairs;
        attend(first_pair + pair, task / pairs, scratch.data(), panels + pair * panels_.elements());
      });
    }
    runtime_.free_since(mark);
  }

  // Packs one tile, unless no query sees it and nothing new is in it.
  void pack(int64_t pair, int64_t tile, C* scratch, C* panels) const {
    const int64_t batch = pair / p_.kv_heads;
    const int64_t end = valid_keys(p_, batch);
    const KeyRange seen = visible_range(p_, batch, 0, p_.num_queries);
    const bool is_seen = tile < seen.end && tile + kKeys > seen.begin;
    const bool has_new = tile < end && tile + kKeys > past_length(p_, batch);
    if (is_seen || (has_new && p_.present_key != nullptr) || (has_new && p_.present_value != nullptr)) {
      panels_.pack_tile(batch, pair % p_.kv_heads, tile, end, scratch, panels);
    }
  }

  void attend(int64_t pair, int64_t index, C* scratch, const C* panels) const {
    const int64_t row = (blocks_per_pair_ - 1 - index) * kBlockRows;
    blocks_.run({pair / p_.kv_heads, pair % p_.kv_heads, row, smaller(kBlockRows, rows_ - row)}, panels, scratch);
  }

  const AttentionProblem& p_;
  Runtime& runtime_;
  LogitsStage<C> logits_;
  KeyPanels<C> panels_;
  QueryBlock<C> blocks_;
  int64_t rows_;
  int64_t blocks_per_pair_;
};

}  // namespace QKNORM_ISA
}  // namespace qknorm
