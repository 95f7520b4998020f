// Prefill of a KV head: attention and observation in one pass, so that no probability is computed twice. If attention
// runs elsewhere, queries are only observed. No buffer has the size of queries x slots.
//
// The work is split into blocks of a KV head's queries. Attention takes nearly all of the time and runs on any thread
// in any order, `width` queries at a time (lane_attention.hpp). Blocks are folded into the columns in text order.
#include <kvdsl/prompt.hpp>

#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <memory>
#include <new>
#include <thread>

#include "lane_attention.hpp"
#include "slots.hpp"

namespace kvdsl {

namespace {

// The next block to fold, for every KV head.
class Turns {
 public:
  explicit Turns(int heads) : turn_(new (std::nothrow) std::atomic<int>[static_cast<std::size_t>(heads)]()) {}

  explicit operator bool() const { return turn_ != nullptr; }

  bool has_come(int head, int block) const { return turn_[head].load(std::memory_order_acquire) == block; }

  void wait(int head, int block) const {
    while (!has_come(head, block)) std::this_thread::yield();
  }

  void pass(int head) { turn_[head].fetch_add(1, std::memory_order_release); }

 private:
  std::unique_ptr<std::atomic<int>[]> turn_;
};

// A block of a KV head's queries.
class PromptBlock : PromptHead {
 public:
  // Queries `first` to `end` of KV head `number`, counted over all rows.
  PromptBlock(const PromptHead& head, Products by, const TwoValues& values, int first, int end, Arena arena)
      : PromptHead(head), first_(first), end_(end), attention_(*this, by, values, arena) {
    state_ = args.state + int64_t{number} * args.slots;
    column_stride_ = int64_t{args.batch} * args.kv_heads * args.slots;
    queries_ = arena.take<float>(query_block * args.group * args.key_dim);
    row_stride_ = attention_.room();
    attn_ = arena.take<float>(steps.needs_attn ? row_stride_ * query_block : 0);
    logit_ = arena.take<float>(steps.needs_logit ? row_stride_ * query_block : 0);
    sums_ = arena.take<float>(steps.columns * int64_t{args.slots});
    bytes_ = arena.used();
  }

  int64_t bytes() const { return bytes_; }

  // Attends, and folds while data is in caches if may_fold() allows it.
  template <class MayFold>
  void attend(MayFold may_fold) {
    const amx::Configured tiles(attention_.by() == Products::matrix);
    const bool observed = end_ > prompt.first;
    const int together = observed ? width : query_block;
    for (int t = first_; t < end_; t += together) {
      const int to = t + together < end_ ? t + together : end_;
      attend(t, to - t, observed);
      if (observed && may_fold()) fold(to);
    }
  }

  // Folds the rest.
  void end_fold() {
    fold(end_);
    add_sums();
  }

 private:
  // Folds each real query before `to` into the columns, in text order.
  void fold(int to) {
    if (folded_ == first_) begin_fold();
    for (; folded_ < to; ++folded_) {
      if (newest(folded_) < 0) continue;
      ++live_;
      if (folded_ >= prompt.first) observe(folded_);
    }
    kept_from_ = folded_;
  }

  void begin_fold() {
    for (int i = 0; i < cached; ++i) live_ += position[i] >= 0;
    for (int t = 0; t < first_; ++t) live_ += newest(t) >= 0;
    set_sums_aside();
  }

  // For queries in groups of `width`: the group's slots begin at from_[group].
  int lanes_of(int t) const { return (t - first_) / width; }

  // Sets the sums of earlier blocks aside, so that a block's own start at zero.
  void set_sums_aside() {
    for_sums([](float& column, float& sum) { sum = column, column = 0.0f; });
  }

  void add_sums() {
    for_sums([](float& column, float& sum) { column += sum; });
  }

  template <class Change>
  void for_sums(Change change) {
    for (int c = 0; c < steps.columns; ++c) {
      if (!prompt.adds_up[c]) continue;
      float* const column = state_ + c * column_stride_;
      float* const sum = sums_ + int64_t{c} * args.slots;
      for (int i = 0; i < cached + end_; ++i) change(column[i], sum[i]);
    }
  }

  // Attends for queries t to t + count; if observed, one per lane.
  void attend(int t, int count, bool observed) {
    const int64_t place = t - kept_from_;
    const int begin = attention_.attend(t, count, observed, queries_ + place * args.group * args.key_dim);
    if (!observed) return;
    from_[lanes_of(t)] = begin;
    const int slots = cached + t + count - begin;
    if (steps.needs_attn) attention_.reduce(slots, attn_ + place * row_stride_);
    if (steps.needs_logit) attention_.reduce_logits(slots, logit_ + place * row_stride_);
  }

  void observe(int t) {
    const int from = from_[lanes_of(t)];
    const int64_t place = t - kept_from_;
    Query query;
    query.newest = newest(t);
    query.slots = cached + t + 1 - from;
    query.position = position + from;
    query.oldest = oldest_of(query.newest);
    query.window = args.window;
    query.live = live_;
    query.state = state_ + from;
    query.ring_rows = args.ring_rows;
    query.since = 0;
    query.column_stride = column_stride_;
    query.work = nullptr;
    query.work_stride = 0;
    query.params = params_of(args, row, head);
    query.constant = constants_of(args, head);
    query.random_key = absorb(absorb(args.seed, args.layer), args.head_offset + head);
    query.attn = attn_ + place * row_stride_;
    query.logit = logit_ + place * row_stride_;
    query.query = queries_ + place * args.group * args.key_dim;
    query.group = args.group;
    query.query_head = (args.head_offset + head) * args.group;
    query.key_dim = args.key_dim;
    query.value_dim = args.value_dim;
    query.keys = layout(args.key, args.key_stride, from);
    query.values = layout(args.value, args.value_stride, from);
    steps.observe(query);
  }

  int first_, end_;
  int folded_ = first_;     // first query not folded yet
  int kept_from_ = first_;  // query of the first stored row
  int live_ = 0;            // live slots at the last folded query
  LaneAttention attention_;
  float* state_;
  int64_t column_stride_;
  float* queries_;     // [query_block, group, key_dim]
  int64_t row_stride_;
  float* attn_;        // [query_block, row_stride]
  float* logit_;
  float* sums_;        // [columns, slots] sums of earlier blocks
  int64_t bytes_;
  int from_[query_block / width];  // first visible slot of every `width` queries
};

// Returns the norm of all numbers in [batch, heads, count, dim]; NaN if one is NaN.
float length_of(const DecodeArgs& args, const Dtype& dtype, const void* x, const int64_t (&stride)[3], int heads, int count,
                int dim) {
  constexpr int part = 256;  // vectors of a head per task
  const int parts = (count + part - 1) / part;
  float total = 0;
#pragma omp parallel for num_threads(args.threads > 1 ? args.threads : 1) reduction(+ : total)
  for (int task = 0; task < args.batch * heads * parts; ++task) {
    const int row = task / parts / heads, head = task / parts % heads, first = task % parts * part;
    const int64_t at = row * stride[0] + head * stride[1] + first * stride[2];
    total += dtype.squares(static_cast<const char*>(x) + at * dtype.size, stride[2] * dtype.size,
                           count - first < part ? count - first : part, dim);
  }
  return std::sqrt(total);
}

// Whether all logits and weighted sums are finite, in any order of computation.
bool is_tame(const DecodeArgs& args, const Dtype& dtype) {
  const float query = length_of(args, dtype, args.query, args.query_stride, args.kv_heads * args.group, args.tokens, args.key_dim);
  const float key = length_of(args, dtype, args.key, args.key_stride, args.kv_heads, args.slots, args.key_dim);
  const float value = length_of(args, dtype, args.value, args.value_stride, args.kv_heads, args.slots, args.value_dim);
  // Cauchy-Schwarz: a product is at most the product of the norms.
  return query * key * std::fabs(args.scale) < FLT_MAX / 2 &&
         value * static_cast<float>(args.slots) * most_weight < FLT_MAX / 2;
}

}  // namespace

int prefill(const DecodeArgs& args, const PromptArgs& prompt, const Steps& steps) {
  if (prompt.out && !is_tame(args, *steps.dtype)) return not_tame;
  const int begin = prompt.out ? 0 : prompt.first;
  const int heads = args.batch * args.kv_heads, blocks = (args.tokens - begin + query_block - 1) / query_block;
  const Products by = products_by(args, steps);
  const TwoValues values(args, prompt.out ? by : Products::floats, heads);
  const int64_t workspace = PromptBlock({args, prompt, steps, 0}, by, values, 0, 0, Arena(nullptr)).bytes();
  Turns turns(heads);
  if (!values || !turns) return out_of_memory;
  const int observed = (prompt.first - begin) / query_block;  // first block to fold
  std::atomic<int> taken{0};
  int status = ok;
#pragma omp parallel num_threads(args.threads > 1 ? args.threads : 1) reduction(| : status)
  {
#pragma omp for
    for (int task = 0; task < heads * values.rounds(); ++task) {
      values.read({args, prompt, steps, task / values.rounds()}, task % values.rounds());
    }
    // Blocks start in text order, so a thread that waits for its turn waits for a running one.
    for (int task; (task = taken.fetch_add(1)) < heads * blocks;) {
      const int head = task % heads, number = task / heads, first = begin + number * query_block;
      const int end = args.tokens - first < query_block ? args.tokens : first + query_block;
      char* const memory = thread_buffer().reserve(workspace);
      PromptBlock block({args, prompt, steps, head}, by, values, first, end, Arena(memory));
      const int turn = number - observed;
      if (memory) block.attend([&] { return turn >= 0 && turns.has_come(head, turn); });
      else status |= out_of_memory;
      if (turn < 0) continue;
      turns.wait(head, turn);
      if (memory) block.end_fold();
      turns.pass(head);
    }
  }
  return status;
}

}  // namespace kvdsl
