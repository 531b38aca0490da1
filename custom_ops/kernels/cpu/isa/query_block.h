// One block of query rows of one kv head against all keys they see: the inner work of prefill.
#pragma once

#include "kernels/cpu/isa/key_panels.h"
#include "kernels/cpu/isa/logits_stage.h"
#include "kernels/cpu/isa/rows_ahead.h"
#include "kernels/cpu/isa/softmax_tile.h"

namespace qknorm {
namespace QKNORM_ISA {

// Strips that one block has at most: their queries, outputs and one tile of keys and values stay in the second-level
// cache.
template <class C>
inline constexpr int64_t kMaxStrips = 192 / Tile<C>::kColumns;

// Rows [first_row, first_row + rows) of a kv head. Row r is query r / group of the head's query head r % group: strips
// of neighbouring rows see nearly the same keys, and few queries with many heads still fill a strip.
struct BlockOfRows {
  int64_t batch;
  int64_t kv_head;
  int64_t first_row;
  int64_t rows;
};

// Consecutive rows, one in each lane of two vectors, and the keys that some and that all of them see.
template <class C>
struct Strip {
  int64_t first_row;
  int64_t rows;
  int64_t some_begin;
  int64_t some_end[2];  // of each vector; equal where the second one has no row
  KeyRange all;
  KeyRange of_row[Tile<C>::kColumns];  // those of spare lanes repeat the last
  StripState<C> state;
};

// What a strip reads of one tile, relative to its first key: its vector j keys [begin, end[j]).
struct StripRange {
  int64_t begin;
  int64_t end[2];
};

template <class C>
class QueryBlock {
 public:
  QueryBlock(const AttentionProblem& problem, const Preparation<C>& queries, const KeyPanels<C>& panels,
             const LogitsStage<C>& logits)
      : p_(problem),
        queries_(queries),
        panels_(panels),
        logits_(logits),
        group_(problem.q_heads / problem.kv_heads),
        query_size_(problem.head_size * kColumns),
        output_size_(panels.value_panels() * kRows * kColumns) {}

  // Scratch elements of one worker.
  int64_t scratch_size() const {
    const int64_t for_rows = kColumns * (larger(p_.head_size, p_.value_size) + kLanes<C>)+queries_.scratch_size();
    const int64_t for_bias = logits_.has_bias() ? kColumns * (2 * kKeys + kLanes<C>) : 0;
    return kMaxStrips<C> * (query_size_ + output_size_) + kKeys * kColumns + larger(for_rows, for_bias);
  }

  void run(const BlockOfRows& block, const C* panels, C* scratch) const {
    Strip<C> strips[kMaxStrips<C>];
    C* queries = scratch;
    C* outputs = queries + kMaxStrips<C> * query_size_;
    C* weights = outputs + kMaxStrips<C> * output_size_;
    C* rows = weights + kKeys * kColumns;
    const int64_t count = ceil_div(block.rows, int64_t{kColumns});
    const int64_t first = block.first_row / group_;
    const KeyRange seen =
        visible_range(p_, block.batch, first, (block.first_row + block.rows - 1) / group_ - first + 1);
    const int64_t first_tile = seen.begin / kKeys * kKeys;
    for (int64_t i = 0; i < count; ++i) make_strip(block, i, strips[i]);
    for (int64_t i = 0; i < count * output_size_; i += kLanes<C>) store(outputs + i, Vector<C>{});
    // A strip's queries are packed before its first tile and its outputs written after its last one; both are fetched
    // during the products before.
    for (int64_t tile = first_tile; tile < larger(seen.end, first_tile + 1); tile += kKeys) {
      for (int64_t i = 0; i < count; ++i) {
        const bool is_last = tile + kKeys >= seen.end;
        if (tile == first_tile) pack_queries(block, strips[i], rows, queries + i * query_size_);
        const int64_t steps = kKeys / kRows + panels_.value_panels();
        Ahead ahead = {
            RowsAhead(tile == first_tile && i + 1 < count ? query_rows(block, strips[i + 1]) : FarRows(), steps),
            RowsAhead(is_last ? output_rows(block, strips[i]) : FarRows(), steps)};
        run_tile(block, strips[i], tile, panels, queries + i * query_size_, rows, weights, outputs + i * output_size_,
                 ahead);
        if (is_last) write_strip(block, strips[i], outputs + i * output_size_, rows);
      }
    }
  }

 private:
  static constexpr int64_t kColumns = Tile<C>::kColumns;
  static constexpr int64_t kRows = Tile<C>::kRows;
  static constexpr int64_t kKeys = Tile<C>::kKeys;

  // What is fetched while a tile is computed.
  struct Ahead {
    RowsAhead queries;
    RowsAhead outputs;
    QKNORM_INLINE void step() {
      queries.step();
      outputs.step();
    }
  };

  FarRows query_rows(const BlockOfRows& block, const Strip<C>& strip) const {
    const int64_t first = strip.first_row / group_;
    const int64_t bytes = p_.head_size * storage_size(p_.dtype);
    return {queries_.source(block.batch, block.kv_head * group_, first), p_.q_heads * bytes, group_ * bytes,
            (strip.first_row + strip.rows - 1) / group_ - first + 1};
  }

  FarRows output_rows(const BlockOfRows& block, const Strip<C>& strip) const {
    const int64_t first = strip.first_row / group_;
    const int64_t size = p_.value_size;
    const int64_t token = block.batch * p_.num_queries + first;
    const int64_t bytes = size * storage_size(p_.dtype);
    return {element(p_.y, p_.dtype, (token * p_.q_heads + block.kv_head * group_) * size), p_.q_heads * bytes,
            group_ * bytes, (strip.first_row + strip.rows - 1) / group_ - first + 1};
  }

  void make_strip(const BlockOfRows& block, int64_t index, Strip<C>& strip) const {
    strip.first_row = block.first_row + index * kColumns;
    strip.rows = smaller(block.rows - index * kColumns, kColumns);
    for (int64_t r = 0; r < kColumns; ++r) {
      const int64_t row = strip.first_row + smaller(r, strip.rows - 1);
      strip.of_row[r] = r > 0 && row % group_ != 0 ? strip.of_row[r - 1] : visible_range(p_, block.batch, row / group_);
    }
    strip.some_begin = strip.of_row[0].begin;
    strip.some_end[0] = strip.of_row[kLanes<C> - 1].end;
    strip.some_end[1] = strip.of_row[kColumns - 1].end;
    strip.all = {strip.of_row[kColumns - 1].begin, strip.of_row[0].end};
    start(block, strip);
  }

  int64_t head_of(const BlockOfRows& block, int64_t row) const { return block.kv_head * group_ + row % group_; }

  void start(const BlockOfRows& block, Strip<C>& strip) const {
    const C lowest = -static_cast<C>(__builtin_inf());
    C maximum[kColumns];
    C sum[kColumns];
    for (int64_t r = 0; r < kColumns; ++r) {
      const int64_t head = head_of(block, strip.first_row + r);
      maximum[r] = p_.sink.dtype == QKNORM_ABSENT ? lowest : sink_logit(p_, logits_, head);
      sum[r] = maximum[r] == lowest ? C(0) : C(1);
    }
    for (int j = 0; j < 2; ++j) {
      strip.state.maximum[j] = load(maximum + j * kLanes<C>);
      strip.state.sum[j] = load(sum + j * kLanes<C>);
    }
  }

  // To [head size][lane]; zeros in the spare lanes.
  void pack_queries(const BlockOfRows& block, const Strip<C>& strip, C* rows, C* packed) const {
    const int64_t size = p_.head_size;
    C* scratch = rows + kColumns * size;
    for (int64_t r = 0; r < smaller(group_, strip.rows); ++r) {
      const int64_t row = strip.first_row + r;
      queries_.prepare_rows(block.batch, head_of(block, row), row / group_, ceil_div(strip.rows - r, group_),
                            logits_.q_factor(), scratch, rows + r * size, group_ * size);
    }
    for (int64_t lane = 0; lane < kColumns; lane += kLanes<C>) {
      const int64_t present = smaller(larger(strip.rows - lane, int64_t{0}), int64_t{kLanes<C>});
      transpose_rows<C, kLanes<C>>(rows + lane * size, size, present, size, packed + lane, kColumns);
    }
  }

  void run_tile(const BlockOfRows& block, Strip<C>& strip, int64_t tile, const C* panels, const C* queries, C* rows,
                C* weights, C* outputs, Ahead& ahead) const {
    StripRange range = {larger(strip.some_begin - tile, int64_t{0}) / kRows * kRows, {0, 0}};
    for (int j = 0; j < 2; ++j) range.end[j] = larger(smaller(strip.some_end[j] - tile, kKeys), range.begin);
    if (range.end[1] <= range.begin) return;
    C* bias = rows + kColumns * (kKeys + kLanes<C>);
    if (logits_.has_bias()) read_bias(block, strip, tile, range, rows, bias);
    score(strip, tile, range, panels, queries, bias, weights, ahead);
    if (logits_.plain()) {
      weigh<false>(strip, range, weights);
    } else {
      weigh<true>(strip, range, weights);
    }
    add_values(strip, tile, range, panels, weights, outputs, ahead);
  }

  bool one_vector(const Strip<C>& strip) const { return strip.rows <= kLanes<C>; }

  void score(Strip<C>& strip, int64_t tile, const StripRange& range, const C* panels, const C* queries, const C* bias,
             C* weights, Ahead& ahead) const {
    const int64_t size = p_.head_size;
    Vector<C>* maximum = strip.state.tile_maximum;
    maximum[0] = maximum[1] = broadcast(-static_cast<C>(__builtin_inf()));
    const int64_t end = range.begin + round_up(range.end[1] - range.begin, kRows);  // of whole panels
    const bool all_plain = logits_.plain() && tile + range.begin >= strip.all.begin && tile + end <= strip.all.end;
    const Limits limits = all_plain ? Limits{} : limits_in(strip, tile);
    for (int64_t key = range.begin; key < range.end[1]; key += kRows) {
      const C* panel = panels_.key_panel(panels, tile + key);
      ahead.step();
      const bool plain = logits_.plain() && tile + key >= strip.all.begin && tile + key + kRows <= strip.all.end;
      C* logits = weights + key * kColumns;
      Vector<C> ignored[2] = {};
      Vector<C>* largest = plain ? maximum : ignored;
      with_rows<C>(range.end[1] - key, [&](auto rows) {
        constexpr int n = decltype(rows)::value;
        if (one_vector(strip)) {
          score_panel<C, n, 1>(size, panel, queries, logits, largest);
        } else if (key >= range.end[0]) {
          score_panel<C, n, 1>(size, panel, queries + kLanes<C>, logits + kLanes<C>, largest + 1);
        } else {
          score_panel<C, n, 2>(size, panel, queries, logits, largest);
        }
      });
      if (!plain) finish_logits(strip, limits, key, smaller(range.end[1] - key, kRows), bias, logits);
    }
  }

  // Keys [begin, end) of a tile that each row of a strip sees.
  struct Limits {
    Vector<C> begin[2];
    Vector<C> end[2];
  };

  static Limits limits_in(const Strip<C>& strip, int64_t tile) {
    C begin[kColumns];
    C end[kColumns];
    for (int64_t r = 0; r < kColumns; ++r) {
      begin[r] = static_cast<C>(clip(strip.of_row[r].begin - tile));
      end[r] = static_cast<C>(clip(strip.of_row[r].end - tile));
    }
    return {{load(begin), load(begin + kLanes<C>)}, {load(end), load(end + kLanes<C>)}};
  }

  static int64_t clip(int64_t key) { return smaller(larger(key, int64_t{-1}), kKeys + 1); }

  // Bounds and biases logits of `count` keys, hides what a row does not see, and keeps the maximum of each row.
  void finish_logits(Strip<C>& strip, const Limits& limits, int64_t first, int64_t count, const C* bias,
                     C* logits) const {
    const Vector<C> hidden = broadcast(-static_cast<C>(__builtin_inf()));
    for (int j = 0; j < (one_vector(strip) ? 1 : 2); ++j) {
      Vector<C> maximum = strip.state.tile_maximum[j];
      for (int64_t i = 0; i < count; ++i) {
        C* at = logits + i * kColumns + j * kLanes<C>;
        Vector<C> x = load(at);
        if (!logits_.plain()) x = logits_.bounded(x);
        if (logits_.has_bias()) x = logits_.biased(x, load(bias + (first + i) * kColumns + j * kLanes<C>));
        const Vector<C> key = broadcast(static_cast<C>(first + i));
        x = key < limits.begin[j] ? hidden : x;
        x = key < limits.end[j] ? x : hidden;
        maximum = larger<C>(maximum, x);
        store(at, x);
      }
      strip.state.tile_maximum[j] = maximum;
    }
  }

  // The bias of the tile as [key][lane]; zeros in the spare lanes.
  void read_bias(const BlockOfRows& block, const Strip<C>& strip, int64_t tile, const StripRange& range, C* rows,
                 C* bias) const {
    constexpr int64_t stride = kKeys + kLanes<C>;
    const int64_t count = range.end[1] - range.begin;
    for (int64_t r = 0; r < strip.rows; ++r) {
      const int64_t row = strip.first_row + r;
      logits_.read_bias(block.batch, head_of(block, row), row / group_, tile + range.begin, count, rows + r * stride);
    }
    for (int64_t lane = 0; lane < kColumns; lane += kLanes<C>) {
      const int64_t present = smaller(larger(strip.rows - lane, int64_t{0}), int64_t{kLanes<C>});
      transpose_rows<C, kLanes<C>>(rows + lane * stride, stride, present, count, bias + range.begin * kColumns + lane,
                                   kColumns);
    }
  }

  template <bool Natural>
  void weigh(Strip<C>& strip, const StripRange& range, C* weights) const {
    if (one_vector(strip)) {
      softmax_tile<C, 1, Natural>(strip.state, 0, weights, range.begin, range.end[1]);
    } else if (range.end[0] == range.end[1]) {
      softmax_tile<C, 2, Natural>(strip.state, 0, weights, range.begin, range.end[1]);
    } else {
      softmax_tile<C, 1, Natural>(strip.state, 0, weights, range.begin, range.end[0]);
      softmax_tile<C, 1, Natural>(strip.state, 1, weights, range.begin, range.end[1]);
    }
  }

  // Keys that both vectors see first, then those of the second vector alone.
  void add_values(const Strip<C>& strip, int64_t tile, const StripRange& range, const C* panels, const C* weights,
                  C* outputs, Ahead& ahead) const {
    const int64_t both = range.end[0] - range.begin;
    const int64_t more = one_vector(strip) ? 0 : range.end[1] - range.end[0];
    const Vector<C> once = broadcast(C(1));
    for (int64_t column = 0; column < panels_.value_panels(); ++column) {
      const C* panel = panels_.value_panel(panels, tile, column) + range.begin * kRows;
      ahead.step();
      C* out = outputs + column * kRows * kColumns;
      with_rows<C>(p_.value_size - column * kRows, [&](auto rows) {
        constexpr int n = decltype(rows)::value;
        const C* first = weights + range.begin * kColumns;
        if (one_vector(strip)) {
          accumulate_panel<C, n, 1>(both, panel, first, out, strip.state.rescale);
        } else if (both > 0) {
          accumulate_panel<C, n, 2>(both, panel, first, out, strip.state.rescale);
        }
        if (more > 0) {
          accumulate_panel<C, n, 1>(more, panel + both * kRows, first + both * kColumns + kLanes<C>, out + kLanes<C>,
                                    both > 0 ? &once : strip.state.rescale + 1);
        }
      });
    }
  }

  void write_strip(const BlockOfRows& block, const Strip<C>& strip, const C* outputs, C* rows) const {
    const int64_t size = p_.value_size;
    const int64_t stride = size + kLanes<C>;  // a transpose writes whole vectors
    for (int j = 0; j * kLanes<C> < strip.rows; ++j) {
      const Vector<C> total = strip.state.sum[j];
      const Vector<C> inverse = total == C(0) ? Vector<C>{} : C(1) / total;
      for (int64_t i = 0; i < size; i += kLanes<C>) {
        Vector<C> square[kLanes<C>];
        for (int r = 0; r < kLanes<C>; ++r) {
          square[r] = i + r < size ? load(outputs + (i + r) * kColumns + j * kLanes<C>) * inverse : Vector<C>{};
        }
        transpose<C>(square);
        for (int r = 0; r < kLanes<C>; ++r) store(rows + (j * kLanes<C> + r) * stride + i, square[r]);
      }
    }
    for (int64_t r = 0; r < strip.rows; ++r) {
      const int64_t row = strip.first_row + r;
      const int64_t token = block.batch * p_.num_queries + row / group_;
      write_row(p_.dtype, rows + r * stride, size,
                element(p_.y, p_.dtype, (token * p_.q_heads + head_of(block, row)) * size));
    }
  }

  const AttentionProblem& p_;
  const Preparation<C>& queries_;
  const KeyPanels<C>& panels_;
  const LogitsStage<C>& logits_;
  int64_t group_;
  int64_t query_size_;
  int64_t output_size_;
};

}  // namespace QKNORM_ISA
}  // namespace qknorm
