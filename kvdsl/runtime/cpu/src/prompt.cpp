// What the queries of a prompt give the slots, folded into the policy's columns. Attention itself runs elsewhere and leaves
// every query's log-sum-exp, from which the probabilities can be had once more: nothing here is of the size of queries x slots.
// They are normalised anew, because on 16 bits torch's attention is content with coarse exponentials.
//
// A unit is one KV head of one row, and one thread's. `width` queries go through it together, each in a lane of its own:
// so keys are read as they lie in memory, one number after the other, and the group's heads are reduced lane by lane.
#include <kvdsl/prompt.hpp>

#include <climits>
#include <cstdint>
#include <cstring>

#include "arena.hpp"
#include "attend.hpp"
#include "simd.hpp"
#include "slots.hpp"

namespace kvdsl {

namespace {

// Slots that are worked on together, in parts that keep the registers full of sums.
constexpr int slot_tile = 24;
// Queries that are added up before they join the others: among many thousands, what one gives would be rounded away.
constexpr int query_block = 16 * width;
template <int Heads>
constexpr int slots_at_once = (registers == 32 ? 24 : 8) / Heads;

// sums[s][g] = lanes of q[g] times keys[s], for `Heads` query heads of a group. q: [dim, group, width].
template <int Heads, int Count>
void dot_lanes(const float* q, int group, const float* const* keys, int dim, Floats (&sums)[Count][Heads]) {
  for (int s = 0; s < Count; ++s) {
    for (int g = 0; g < Heads; ++g) sums[s][g] = Floats{};
  }
  for (int d = 0; d < dim; ++d) {
    Floats lanes[Heads];
    for (int g = 0; g < Heads; ++g) lanes[g] = load(q + (int64_t{d} * group + g) * width);
    for (int s = 0; s < Count; ++s) {
      const Floats k = once(splat(keys[s][d]));
      for (int g = 0; g < Heads; ++g) sums[s][g] += lanes[g] * k;
    }
  }
}

class PromptUnit {
 public:
  PromptUnit(const DecodeArgs& args, const PromptArgs& prompt, const Steps& steps, int number, Arena arena)
      : args_(args), prompt_(prompt), steps_(steps), row_(number / args.kv_heads), head_(number % args.kv_heads),
        cached_(args.slots - args.tokens), dim_stride_(round_up(args.key_dim, pair)),
        slot_stride_(round_up(args.slots, slot_tile) + width) {
    position_ = args.position + int64_t{number} * args.slots;
    state_ = args.state + int64_t{number} * args.slots;
    column_stride_ = int64_t{args.batch} * args.kv_heads * args.slots;
    queries_ = arena.take<float>(width * args.group * args.key_dim);
    lanes_ = arena.take<float>(int64_t{args.key_dim} * args.group * width);
    lse_ = arena.take<float>(args.group * width);
    keys_ = arena.take<float>(slot_tile * dim_stride_);
    weights_ = arena.take<float>(steps.needs_attn ? slot_stride_ * args.group * width : 0);
    totals_ = arena.take<float>(args.group * width);
    logit_lanes_ = arena.take<float>(steps.needs_logit ? slot_stride_ * width : 0);
    attn_ = arena.take<float>(steps.needs_attn ? slot_stride_ * width : 0);
    logit_ = arena.take<float>(steps.needs_logit ? slot_stride_ * width : 0);
    sums_ = arena.take<float>(steps.columns * int64_t{args.slots});
    bytes_ = arena.used();
  }

  int64_t bytes() const { return bytes_; }

  void run() {
    for (int i = 0; i < cached_; ++i) live_ += position_[i] >= 0;
    for (int t = 0; t < prompt_.first; ++t) live_ += newest(t) >= 0;
    for (int t = prompt_.first; t < args_.tokens; t += query_block) {
      const int end = args_.tokens - t < query_block ? args_.tokens : t + query_block;
      const int from = from_;
      set_sums_aside(from, end);
      for (int i = t; i < end; i += width) observe_lanes(i, end - i < width ? end - i : width);
      add_sums(from, end);
    }
  }

 private:
  int newest(int t) const { return prompt_.newest[int64_t{row_} * args_.tokens + t]; }

  template <class X>
  const char* at(const X* base, const int64_t (&stride)[3], int head, int index) const {
    return static_cast<const char*>(base) + (row_ * stride[0] + head * stride[1] + index * stride[2]) * steps_.dtype->size;
  }

  // The rows of the slots from the first one on that anybody sees.
  Layout layout(const void* base, const int64_t (&stride)[3]) const {
    return {const_cast<char*>(at(base, stride, head_, from_)), stride[2] * steps_.dtype->size};
  }

  // What a block of queries finds in the columns that add up: nothing.
  void set_sums_aside(int from, int tokens) {
    for_sums(from, tokens, [](float& column, float& sum) { sum = column, column = 0.0f; });
  }

  void add_sums(int from, int tokens) {
    for_sums(from, tokens, [](float& column, float& sum) { column += sum; });
  }

  template <class Change>
  void for_sums(int from, int tokens, Change change) {
    for (int c = 0; c < steps_.columns; ++c) {
      if (!prompt_.adds_up[c]) continue;
      float* const column = state_ + c * column_stride_;
      float* const sum = sums_ + int64_t{c} * args_.slots;
      for (int i = from; i < cached_ + tokens; ++i) change(column[i], sum[i]);
    }
  }

  // Queries t to t + count, a lane each.
  void observe_lanes(int t, int count) {
    read_queries(t, count);
    leave_behind(t, count);
    const int end = cached_ + t + count;
    if (steps_.needs_attn || steps_.needs_logit) {
      for (int from = from_; from < end; from += slot_tile) weigh(from, end, t);
    }
    if (steps_.needs_attn) normalise(end - from_);
    if (steps_.needs_logit) {
      for (int i = 0; i < end - from_; ++i) to_rows(load(logit_lanes_ + int64_t{i} * width), i, logit_);
    }
    for (int i = 0; i < count; ++i) observe(t + i, i);
  }

  // The queries in order, for the policy; and lane by lane, scaled.
  void read_queries(int t, int count) {
    const int size = args_.group * args_.key_dim;
    std::memset(lanes_, 0, sizeof(float) * static_cast<std::size_t>(size * width));
    std::memset(lse_, 0, sizeof(float) * static_cast<std::size_t>(args_.group * width));
    std::memset(totals_, 0, sizeof(float) * static_cast<std::size_t>(args_.group * width));
    for (int i = 0; i < count; ++i) {
      for (int g = 0; g < args_.group; ++g) {
        const char* const row = at(args_.query, args_.query_stride, head_ * args_.group + g, t + i);
        const float* const query = steps_.dtype->as_floats(row, args_.key_dim, keys_);
        std::memcpy(queries_ + i * size + g * args_.key_dim, query, sizeof(float) * static_cast<std::size_t>(args_.key_dim));
        for (int d = 0; d < args_.key_dim; ++d) lanes_[(d * args_.group + g) * width + i] = query[d] * args_.scale;
        const int64_t head = (int64_t{row_} * args_.kv_heads + head_) * args_.group + g;
        lse_[g * width + i] = prompt_.lse[head * args_.tokens + t + i];
      }
    }
  }

  // The lowest position that a query sees; nothing is as high as what padding sees.
  int oldest_of(int newest) const {
    if (newest < 0) return INT_MAX;
    return args_.window > 0 && newest >= args_.window ? newest - args_.window + 1 : 0;
  }

  // With a window, slots in front that no query sees any more.
  void leave_behind(int t, int count) {
    for (int i = 0; i < width; ++i) oldest_[i] = i < count ? oldest_of(newest(t + i)) : INT_MAX;
    if (args_.window <= 0) return;
    int oldest = INT_MAX;
    for (int i = 0; i < count; ++i) oldest = oldest_[i] < oldest ? oldest_[i] : oldest;
    while (from_ < cached_ + t && position_[from_] < oldest) ++from_;
  }

  // Scores of a tile of slots and their exponentials, lane by lane. Behind `end` there is nothing to see.
  [[gnu::noinline]] void weigh(int from, int end, int t) {
    const float* keys[slot_tile];
    Ints seen[slot_tile];
    for (int s = 0; s < slot_tile; ++s) {
      const int slot = from + s < end ? from + s : end - 1;
      keys[s] = steps_.dtype->as_floats(at(args_.key, args_.key_stride, head_, slot), args_.key_dim, keys_ + s * dim_stride_);
      seen[s] = from + s < end ? who_sees(slot, t) : Ints{};
    }
    for_heads(args_.group, [&](int g, auto heads) {
      constexpr int count = slots_at_once<heads()>;
      for (int s = 0; s < slot_tile; s += count) {
        Floats sums[count][heads()];
        dot_lanes<heads(), count>(lanes_ + g * width, args_.group, keys + s, args_.key_dim, sums);
        for (int j = 0; j < count; ++j) {
          for (int h = 0; h < heads(); ++h) give(sums[j][h], seen[s + j], g + h, from - from_ + s + j);
        }
      }
    });
  }

  // A mask of the lanes whose queries see the slot.
  Ints who_sees(int slot, int t) const {
    return (load_as<Ints>(oldest_) <= position_[slot]) & (own_lanes() + (cached_ + t) >= slot);
  }

  static Ints own_lanes() {
    Ints lanes;
    for (int i = 0; i < width; ++i) lanes[i] = i;
    return lanes;
  }

  void give(Floats score, Ints seen, int g, int slot) {
    if (args_.softcap > 0) score = args_.softcap * tanh(score / args_.softcap);
    if (steps_.needs_logit) {
      float* const to = logit_lanes_ + int64_t{slot} * width;
      store(to, join(load(to), score, g));
    }
    if (steps_.needs_attn) {
      const Floats weight = seen != 0 ? exp(score - load(lse_ + g * width)) : Floats{};
      store(weights_ + (int64_t{slot} * args_.group + g) * width, weight);
      store(totals_ + g * width, load(totals_ + g * width) + weight);
    }
  }

  // What query head g gives joins what those before it gave.
  Floats join(Floats old, Floats x, int g) const {
    if (g > 0) x = steps_.group == Group::max ? (old > x || old != old ? old : x) : old + x;
    return steps_.group == Group::mean && g == args_.group - 1 ? x / static_cast<float>(args_.group) : x;
  }

  // Probabilities, reduced over the group.
  [[gnu::noinline]] void normalise(int slots) {
    for (int g = 0; g < args_.group; ++g) {
      Floats total = load(totals_ + g * width);
      if (args_.sinks) total += exp(args_.sinks[head_ * args_.group + g] - load(lse_ + g * width));
      store(totals_ + g * width, 1.0f / total);
    }
    for (int i = 0; i < slots; ++i) {
      Floats attn{};
      for (int g = 0; g < args_.group; ++g) {
        attn = join(attn, load(weights_ + (int64_t{i} * args_.group + g) * width) * load(totals_ + g * width), g);
      }
      to_rows(attn, i, attn_);
    }
  }

  // A slot's lanes into one row each.
  void to_rows(Floats lanes, int slot, float* rows) const {
    for (int i = 0; i < width; ++i) rows[i * slot_stride_ + slot] = lanes[i];
  }

  void observe(int t, int lane) {
    Query query;
    query.newest = newest(t);
    if (query.newest < 0) return;
    query.slots = cached_ + t + 1 - from_;
    query.position = position_ + from_;
    query.oldest = oldest_of(query.newest);
    query.window = args_.window;
    query.live = ++live_;
    query.state = state_ + from_;
    query.ring_rows = args_.ring_rows;
    query.column_stride = column_stride_;
    query.work = nullptr;
    query.work_stride = 0;
    query.params = params_of(args_, row_, head_);
    query.constant = constants_of(args_, head_);
    query.random_key = absorb(absorb(args_.seed, args_.layer), args_.head_offset + head_);
    query.attn = attn_ + lane * slot_stride_;
    query.logit = logit_ + lane * slot_stride_;
    query.query = queries_ + lane * args_.group * args_.key_dim;
    query.group = args_.group;
    query.key_dim = args_.key_dim;
    query.value_dim = args_.value_dim;
    query.keys = layout(args_.key, args_.key_stride);
    query.values = layout(args_.value, args_.value_stride);
    steps_.observe(query);
  }

  const DecodeArgs& args_;
  const PromptArgs& prompt_;
  const Steps& steps_;
  int row_, head_;
  int cached_;         // slots in front of the new tokens'
  int64_t dim_stride_, slot_stride_;
  const int32_t* position_;
  float* state_;
  int64_t column_stride_;
  float* queries_;     // [width, group, key_dim]
  float* lanes_;       // [key_dim, group, width]
  float* lse_;         // [group, width]
  float* keys_;        // [slot_tile, dim_stride] a tile's, where they are not floats already
  float* weights_;     // [slots, group, width] exponentials
  float* totals_;      // [group, width] their sums, then 1 / these
  float* logit_lanes_; // [slots, width]
  float* attn_;        // [width, slot_stride]
  float* logit_;
  float* sums_;        // [columns, slots] of the blocks before
  int64_t bytes_;
  int32_t oldest_[width];
  int from_ = 0;       // the first slot that anybody sees
  int live_ = 0;
};

}  // namespace

int observe(const DecodeArgs& args, const PromptArgs& prompt, const Steps& steps) {
  const int units = args.batch * args.kv_heads;
  const int64_t workspace = PromptUnit(args, prompt, steps, 0, Arena(nullptr)).bytes();
  int status = ok;
#pragma omp parallel for schedule(dynamic, 1) num_threads(args.threads > 1 ? args.threads : 1) reduction(| : status)
  for (int u = 0; u < units; ++u) {
    char* const memory = thread_buffer().reserve(workspace);
    if (memory) PromptUnit(args, prompt, steps, u, Arena(memory)).run();
    else status |= out_of_memory;
  }
  return status;
}

}  // namespace kvdsl
