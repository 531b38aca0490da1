// One block of queries of one kv head against all keys they see: the inner work of prefill.
#pragma once

#include "kernels/cpu/isa/key_panels.h"
#include "kernels/cpu/isa/logits_stage.h"
#include "kernels/cpu/isa/softmax_tile.h"

namespace qknorm {
namespace QKNORM_ISA {

inline constexpr int64_t kMaxStrips = 32;

// Queries [first_query, first_query + num_queries) of the heads [first_head, first_head + num_heads), one kv head.
struct BlockOfQueries {
  int64_t batch;
  int64_t kv_head;
  int64_t first_head;
  int64_t num_heads;
  int64_t first_query;
  int64_t num_queries;
};

// kRows consecutive queries of one head (fewer in the last strip), and the keys that some and that all of them see.
template <class C>
struct Strip {
  int64_t head;
  int64_t first_query;
  int64_t rows;
  KeyRange some;
  KeyRange all;
  KeyRange of_row[kLanes<C>];  // those of spare lanes repeat the last
  StripState<C> state;
};

template <class C>
class QueryBlock {
 public:
  QueryBlock(const AttentionProblem& problem, const Preparation<C>& queries, const KeyPanels<C>& panels,
             const LogitsStage<C>& logits)
      : p_(problem), queries_(queries), panels_(panels), logits_(logits) {}

  // Scratch elements of one worker.
  int64_t scratch_size() const {
    return query_elements() + kMaxStrips * (kStripWeights + kStripOutput * panels_.value_panels()) + row_elements();
  }

  void run(const BlockOfQueries& block, const C* panels, C* scratch) const {
    Strip<C> strips[kMaxStrips];
    C* packed_queries = scratch;
    C* weights = packed_queries + query_elements();
    C* outputs = weights + kMaxStrips * kStripWeights;
    C* rows = outputs + kMaxStrips * kStripOutput * panels_.value_panels();
    const int64_t count = make_strips(block, strips);
    for (int64_t i = 0; i < count; ++i) pack_queries(block.batch, strips[i], rows, packed_queries + i * query_step());
    const int64_t output_size = count * kStripOutput * panels_.value_panels();
    for (int64_t i = 0; i < output_size; i += kLanes<C>) store(outputs + i, Vector<C>{});

    const KeyRange seen = visible_range(p_, block.batch, block.first_query, block.num_queries);
    for (int64_t tile = seen.begin / kTileKeys * kTileKeys; tile < seen.end; tile += kTileKeys) {
      score_tile(block.batch, strips, count, tile, panels, packed_queries, rows, weights);
      for (int64_t i = 0; i < count; ++i) weigh_strip(strips[i], tile, weights + i * kStripWeights);
      add_values(strips, count, tile, panels, weights, outputs);
    }
    for (int64_t i = 0; i < count; ++i) write_strip(block.batch, strips[i], i, count, outputs, rows);
  }

 private:
  static constexpr int64_t kColumns = Tile<C>::kColumns;
  static constexpr int64_t kRows = Tile<C>::kRows;
  static constexpr int64_t kStripWeights = kTileKeys * kLanes<C>;
  static constexpr int64_t kStripOutput = kRows * kColumns;  // of one value panel

  int64_t query_step() const { return p_.head_size * kRows; }
  int64_t query_elements() const { return kMaxStrips * query_step() + kLanes<C>; }
  int64_t row_elements() const {
    const int64_t for_queries = kRows * p_.head_size + queries_.scratch_size();
    const int64_t for_output = panels_.value_panels() * kColumns;
    return larger(larger(for_queries, for_output), kRows * kColumns);
  }

  int64_t make_strips(const BlockOfQueries& block, Strip<C>* strips) const {
    int64_t count = 0;
    for (int64_t head = block.first_head; head < block.first_head + block.num_heads; ++head) {
      for (int64_t done = 0; done < block.num_queries; done += kRows) {
        Strip<C>& strip = strips[count++];
        strip.head = head;
        strip.first_query = block.first_query + done;
        strip.rows = smaller(block.num_queries - done, kRows);
        for (int64_t r = 0; r < kLanes<C>; ++r) {
          strip.of_row[r] = visible_range(p_, block.batch, strip.first_query + smaller(r, strip.rows - 1));
        }
        const KeyRange first = strip.of_row[0];
        const KeyRange last = strip.of_row[strip.rows - 1];
        strip.some = {first.begin, last.end};
        strip.all = {last.begin, first.end};
        start(strip.state, head);
      }
    }
    return count;
  }

  void start(StripState<C>& state, int64_t head) const {
    state.maximum = broadcast(-static_cast<C>(__builtin_inf()));
    state.sum = Vector<C>{};
    if (p_.sink.dtype == QKNORM_ABSENT) return;
    const C sink = sink_logit(p_, logits_, head);
    state.maximum = broadcast(sink);
    if (sink != -static_cast<C>(__builtin_inf())) state.sum = broadcast(C(1));
  }

  void pack_queries(int64_t batch, const Strip<C>& strip, C* rows, C* packed) const {
    const int64_t size = p_.head_size;
    C* scratch = rows + kRows * size;
    queries_.prepare_rows(batch, strip.head, strip.first_query, strip.rows, logits_.q_factor(), scratch, rows);
    transpose_rows(rows, size, strip.rows, size, packed, kRows);
  }

  // Keys of the tile that the strip reads, relative to its beginning; whole panels at the left end.
  static KeyRange in_tile(const Strip<C>& strip, int64_t tile) {
    const int64_t begin = larger(strip.some.begin - tile, int64_t{0}) / kColumns * kColumns;
    return {begin, smaller(strip.some.end - tile, kTileKeys)};
  }

  void score_tile(int64_t batch, Strip<C>* strips, int64_t count, int64_t tile, const C* panels, const C* queries,
                  C* rows, C* weights) const {
    const int64_t lines = ceil_div(kColumns * p_.head_size * static_cast<int64_t>(sizeof(C)), 64 * count);
    for (int64_t i = 0; i < count; ++i) {
      strips[i].state.tile_maximum = broadcast(-static_cast<C>(__builtin_inf()));
    }
    for (int64_t column = 0; column < kTileKeys; column += kColumns) {
      const C* panel = panels_.key_panel(panels, tile + column);
      const C* next =
          column + kColumns < kTileKeys ? panel + kColumns * p_.head_size : panels_.value_panel(panels, tile, 0);
      for (int64_t i = 0; i < count; ++i) {
        const KeyRange range = in_tile(strips[i], tile);
        if (column < range.begin || column >= range.end) continue;
        prefetch_lines(next + i * lines * (64 / static_cast<int64_t>(sizeof(C))), lines);
        TileSums<C> sums = {};
        multiply_add<C, kRows>(p_.head_size, queries + i * query_step(), panel, sums);
        if (!logits_.plain()) {
          TileSums<C> logits = sums;  // a copy, so that the sums themselves need not be in memory
          bound_and_bias(batch, strips[i], tile + column, logits, rows);
          sums = logits;
        }
        store_logits(strips[i], tile + column, sums, weights + i * kStripWeights + column * kLanes<C>);
      }
    }
  }

  void bound_and_bias(int64_t batch, const Strip<C>& strip, int64_t key, TileSums<C>& sums, C* rows) const {
    for (int64_t r = 0; r < strip.rows; ++r) {
      C* row = rows + r * kColumns;
      store(row, sums.row[r][0]);
      store(row + kLanes<C>, sums.row[r][1]);
      logits_.apply(batch, strip.head, strip.first_query + r, key, kColumns, row);
      sums.row[r][0] = load(row);
      sums.row[r][1] = load(row + kLanes<C>);
    }
  }

  // Transposes to [key][lane = row], hides what a row does not see, and keeps the maximum of each row.
  void store_logits(Strip<C>& strip, int64_t key, const TileSums<C>& sums, C* logits) const {
    const bool all_seen = key >= strip.all.begin && key + kColumns <= strip.all.end;
    Vector<C> maximum = strip.state.tile_maximum;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Vector<C> block[kLanes<C>];
#pragma GCC unroll 16
      for (int r = 0; r < kLanes<C>; ++r) block[r] = r < kRows ? sums.row[r < kRows ? r : 0][half] : Vector<C>{};
      transpose<C>(block);
      if (!all_seen) hide_keys(strip, key + half * kLanes<C>, block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes<C>; ++i) {
        maximum = larger<C>(maximum, block[i]);
        store(logits + (half * kLanes<C> + i) * kLanes<C>, block[i]);
      }
    }
    strip.state.tile_maximum = maximum;
  }

  void hide_keys(const Strip<C>& strip, int64_t key, Vector<C>* block) const {
    C begin[kLanes<C>];
    C end[kLanes<C>];
    for (int r = 0; r < kLanes<C>; ++r) {
      begin[r] = static_cast<C>(clip(strip.of_row[r].begin - key));
      end[r] = static_cast<C>(clip(strip.of_row[r].end - key));
    }
    const Vector<C> first = load(begin);
    const Vector<C> past_last = load(end);
    const Vector<C> hidden = broadcast(-static_cast<C>(__builtin_inf()));
    for (int i = 0; i < kLanes<C>; ++i) {
      const Vector<C> index = broadcast(static_cast<C>(i));
      block[i] = index < first ? hidden : block[i];
      block[i] = index < past_last ? block[i] : hidden;
    }
  }

  static int64_t clip(int64_t key) { return smaller(larger(key, int64_t{-1}), int64_t{kLanes<C> + 1}); }

  void weigh_strip(Strip<C>& strip, int64_t tile, C* weights) const {
    const KeyRange range = in_tile(strip, tile);
    if (range.begin >= range.end) return;
    if (logits_.plain()) {
      softmax_tile<C, false>(strip.state, weights, range.begin, range.end);
    } else {
      softmax_tile<C, true>(strip.state, weights, range.begin, range.end);
    }
  }

  void add_values(const Strip<C>* strips, int64_t count, int64_t tile, const C* panels, const C* weights,
                  C* outputs) const {
    const int64_t lines = ceil_div(kTileKeys * kColumns * static_cast<int64_t>(sizeof(C)), 64 * count);
    for (int64_t column = 0; column < panels_.value_panels(); ++column) {
      const C* panel = panels_.value_panel(panels, tile, column);
      const C* next = column + 1 < panels_.value_panels() ? panel + kTileKeys * kColumns
                                                          : panels_.key_panel(panels, tile + kTileKeys);
      for (int64_t i = 0; i < count; ++i) {
        const KeyRange range = in_tile(strips[i], tile);
        if (range.begin >= range.end) continue;
        prefetch_lines(next + i * lines * (64 / static_cast<int64_t>(sizeof(C))), lines);
        C* output = outputs + (column * count + i) * kStripOutput;
        TileSums<C> sums;
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const Vector<C> rescale = broadcast(strips[i].state.rescale[r]);
          sums.row[r][0] = load(output + r * kColumns) * rescale;
          sums.row[r][1] = load(output + r * kColumns + kLanes<C>) * rescale;
        }
        multiply_add<C, kLanes<C>>(range.end - range.begin, weights + i * kStripWeights + range.begin * kLanes<C>,
                                   panel + range.begin * kColumns, sums);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          store(output + r * kColumns, sums.row[r][0]);
          store(output + r * kColumns + kLanes<C>, sums.row[r][1]);
        }
      }
    }
  }

  void write_strip(int64_t batch, const Strip<C>& strip, int64_t index, int64_t count, const C* outputs, C* row) const {
    for (int64_t r = 0; r < strip.rows; ++r) {
      const C total = strip.state.sum[r];
      const Vector<C> inverse = broadcast(total == 0 ? C(0) : C(1) / total);
      const int64_t token = batch * p_.num_queries + strip.first_query + r;
      void* y = element(p_.y, p_.dtype, (token * p_.q_heads + strip.head) * p_.value_size);
      const bool in_place = p_.dtype == dtype_of<C>() && p_.value_size % kColumns == 0;
      C* out = in_place ? static_cast<C*>(y) : row;
      for (int64_t column = 0; column < panels_.value_panels(); ++column) {
        const C* from = outputs + (column * count + index) * kStripOutput + r * kColumns;
        store(out + column * kColumns, load(from) * inverse);
        store(out + column * kColumns + kLanes<C>, load(from + kLanes<C>) * inverse);
      }
      if (!in_place) write_row(p_.dtype, row, p_.value_size, y);
    }
  }

  const AttentionProblem& p_;
  const Preparation<C>& queries_;
  const KeyPanels<C>& panels_;
  const LogitsStage<C>& logits_;
};

}  // namespace QKNORM_ISA
}  // namespace qknorm
