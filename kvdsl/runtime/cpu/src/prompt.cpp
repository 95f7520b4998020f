// The queries of a prompt attend, and what they give the slots is folded into the policy's columns: in one pass, so that no
// probability is computed twice. Where attention itself runs elsewhere, they are only observed. Nothing here is of the size of
// queries x slots.
//
// The work is cut into blocks of a KV head's queries. What they attend to, which takes nearly all of the time, is found by any
// thread in any order; it is folded block after block. `width` queries go through together, each in a lane of its own: so keys
// and values are read as they lie in memory, one number after the other, and the group's heads are reduced lane by lane. In
// bfloat16 matrix units give the same products of keys many at a time, where there are any.
#include <kvdsl/prompt.hpp>

#include <atomic>
#include <cfloat>
#include <climits>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <thread>

#include "amx.hpp"
#include "arena.hpp"
#include "attend.hpp"
#include "simd.hpp"
#include "slots.hpp"

namespace kvdsl {

namespace {

// Slots whose scores are found together, in parts that keep the registers full of sums.
constexpr int slot_tile = 24;
// Slots whose values are added up together, for all of a head's values: both stay in the first-level cache.
constexpr int value_tile = 64;
// Queries of a block. What they give is added up before it joins the others': among many thousands it would be rounded away.
constexpr int query_block = 64;
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

// Values of a slot that are added up together, for `Heads` query heads of a group: a power of two, at most value_pad.
template <int Heads>
constexpr int values_at_once = registers == 32 ? (Heads == 1 ? 16 : Heads == 4 ? 4 : 8) : Heads == 1 ? 8 : Heads == 2 ? 4 : 2;
constexpr int value_pad = 16;

// sums[v][g] += lanes of weights[s][g] times values[s][v], over `slots` slots, for `Heads` query heads of a group.
// weights: [slots, group, width]. values: [slots, stride]. sums: [values, group, width].
template <int Heads, int Count>
void add_lanes(const float* weights, int group, const float* values, int64_t stride, int slots, float* sums) {
  Floats total[Count][Heads];
  for (int v = 0; v < Count; ++v) {
    for (int g = 0; g < Heads; ++g) total[v][g] = load(sums + (int64_t{v} * group + g) * width);
  }
  for (int s = 0; s < slots; ++s) {
    Floats lanes[Heads];
    for (int g = 0; g < Heads; ++g) lanes[g] = load(weights + (int64_t{s} * group + g) * width);
    for (int v = 0; v < Count; ++v) {
      const Floats x = once(splat(values[s * stride + v]));
      for (int g = 0; g < Heads; ++g) total[v][g] += lanes[g] * x;
    }
  }
  for (int v = 0; v < Count; ++v) {
    for (int g = 0; g < Heads; ++g) store(sums + (int64_t{v} * group + g) * width, total[v][g]);
  }
}

// As many of the group's heads at a time as there are registers for. Calls body(first head, number of heads as a constant).
template <class Body>
void for_lanes(int group, Body&& body) {
  const int rest = group % 4 == 3 ? 3 : 0;
  for_heads(group - rest, body);
  if (rest) body(group - rest, std::integral_constant<int, 3>{});
}

// Whose turn it is to fold, for every KV head.
class Turns {
 public:
  explicit Turns(int heads) : turn_(new (std::nothrow) std::atomic<int>[static_cast<std::size_t>(heads)]()) {}

  explicit operator bool() const { return turn_ != nullptr; }

  void wait(int head, int block) const {
    while (turn_[head].load(std::memory_order_acquire) != block) std::this_thread::yield();
  }

  void pass(int head) { turn_[head].fetch_add(1, std::memory_order_release); }

 private:
  std::unique_ptr<std::atomic<int>[]> turn_;
};

// Whether products of queries and keys come from a matrix unit.
bool by_matrix(const DecodeArgs& args, const Steps& steps) {
  return steps.dtype == &bfloat16 && args.key_dim % amx::dims_at_once == 0 && amx::lent();
}

class PromptBlock {
 public:
  // Queries `first` to `end` of KV head `number` of all rows' heads.
  PromptBlock(const DecodeArgs& args, const PromptArgs& prompt, const Steps& steps, int number, int first, int end, Arena arena)
      : args_(args), prompt_(prompt), steps_(steps), row_(number / args.kv_heads), head_(number % args.kv_heads),
        first_(first), end_(end), cached_(args.slots - args.tokens), dim_stride_(round_up(args.key_dim, pair)),
        attends_(prompt.out != nullptr), weighs_(attends_ || steps.needs_attn), value_stride_(round_up(args.value_dim, value_pad)),
        by_matrix_(by_matrix(args, steps)),
        slots_together_(by_matrix_ ? amx::keys_at_once : slot_tile), slot_stride_(round_up(args.slots, slots_together_) + width) {
    position_ = args.position + int64_t{number} * args.slots;
    state_ = args.state + int64_t{number} * args.slots;
    column_stride_ = int64_t{args.batch} * args.kv_heads * args.slots;
    queries_ = arena.take<float>(query_block * args.group * args.key_dim);
    lanes_ = arena.take<float>(int64_t{args.key_dim} * args.group * width);
    tops_ = arena.take<float>(args.group * width);
    keys_ = arena.take<float>(slot_tile * dim_stride_);
    pairs_ = arena.take<bf16>(by_matrix_ ? int64_t{args.group} * args.key_dim * width : 0);
    rows_ = arena.take<bf16>(by_matrix_ ? int64_t{amx::keys_at_once} * args.key_dim : 0);
    scores_ = arena.take<float>(by_matrix_ ? amx::keys_at_once * width : 0);
    weights_ = arena.take<float>(weighs_ ? slot_stride_ * args.group * width : 0);
    totals_ = arena.take<float>(args.group * width);
    values_ = arena.take<float>(attends_ ? value_tile * value_stride_ : 0);
    out_ = arena.take<float>(attends_ ? value_stride_ * args.group * width : 0);
    out_row_ = arena.take<float>(attends_ ? 2 * round_up(args.value_dim, pair) : 0);
    logit_lanes_ = arena.take<float>(steps.needs_logit ? slot_stride_ * width : 0);
    attn_ = arena.take<float>(steps.needs_attn ? slot_stride_ * query_block : 0);
    logit_ = arena.take<float>(steps.needs_logit ? slot_stride_ * query_block : 0);
    sums_ = arena.take<float>(steps.columns * int64_t{args.slots});
    bytes_ = arena.used();
  }

  int64_t bytes() const { return bytes_; }

  // What the queries attend to, and what they give the slots; reads nothing that folding changes.
  void attend() {
    const amx::Configured tiles(by_matrix_);
    for (int t = first_; t < end_; t += width) attend_lanes(t, end_ - t < width ? end_ - t : width);
  }

  // Each query that counts, in the order of the text, into the columns.
  void fold() {
    if (end_ <= prompt_.first) return;
    int live = 0;
    for (int i = 0; i < cached_; ++i) live += position_[i] >= 0;
    for (int t = 0; t < first_; ++t) live += newest(t) >= 0;
    set_sums_aside();
    for (int t = first_; t < end_; ++t) {
      if (newest(t) < 0) continue;
      ++live;
      if (t >= prompt_.first) observe(t, live);
    }
    add_sums();
  }

 private:
  int newest(int t) const { return prompt_.newest[int64_t{row_} * args_.tokens + t]; }

  template <class X>
  const char* at(const X* base, const int64_t (&stride)[3], int head, int index) const {
    return static_cast<const char*>(base) + (row_ * stride[0] + head * stride[1] + index * stride[2]) * steps_.dtype->size;
  }

  // Where in the block the query is one of `width`: their slots begin at from_[that].
  int lanes_of(int t) const { return (t - first_) / width; }

  // The rows of the slots from one on.
  Layout layout(const void* base, const int64_t (&stride)[3], int from) const {
    return {const_cast<char*>(at(base, stride, head_, from)), stride[2] * steps_.dtype->size};
  }

  // What a block of queries finds in the columns that add up: nothing.
  void set_sums_aside() {
    for_sums([](float& column, float& sum) { sum = column, column = 0.0f; });
  }

  void add_sums() {
    for_sums([](float& column, float& sum) { column += sum; });
  }

  template <class Change>
  void for_sums(Change change) {
    for (int c = 0; c < steps_.columns; ++c) {
      if (!prompt_.adds_up[c]) continue;
      float* const column = state_ + c * column_stride_;
      float* const sum = sums_ + int64_t{c} * args_.slots;
      for (int i = 0; i < cached_ + end_; ++i) change(column[i], sum[i]);
    }
  }

  // Queries t to t + count, a lane each.
  void attend_lanes(int t, int count) {
    read_queries(t, count);
    const int begin = from_[lanes_of(t)] = first_seen(t, count), end = cached_ + t + count, row = t - first_;
    if (weighs_ || steps_.needs_logit) {
      for (int from = begin; from < end; from += slots_together_) {
        if (by_matrix_) weigh_by_matrix(from, begin, end, t);
        else weigh_tile(from, begin, end, t);
      }
    }
    if (weighs_) {
      exponentiate(begin, end - begin);
      if (attends_) write(t, count);
    }
    if (t + count <= prompt_.first) return;
    if (steps_.needs_attn) reduce(end - begin, attn_ + row * slot_stride_);
    if (steps_.needs_logit) {
      for (int i = 0; i < end - begin; ++i) to_rows(load(logit_lanes_ + int64_t{i} * width), i, logit_ + row * slot_stride_);
    }
  }

  // The queries in order, for the policy; and lane by lane, scaled.
  void read_queries(int t, int count) {
    const int size = args_.group * args_.key_dim;
    if (by_matrix_) std::memset(pairs_, 0, sizeof(bf16) * static_cast<std::size_t>(size * width));
    else std::memset(lanes_, 0, sizeof(float) * static_cast<std::size_t>(size * width));
    for (int g = 0; g < args_.group; ++g) {  // a learned sink's logit takes part; without one whatever is seen is higher
      const float sink = args_.sinks ? args_.sinks[head_ * args_.group + g] : -FLT_MAX;
      store(tops_ + g * width, splat(sink > -FLT_MAX ? sink : -FLT_MAX));
    }
    for (int i = 0; i < count; ++i) {
      for (int g = 0; g < args_.group; ++g) {
        const char* const row = at(args_.query, args_.query_stride, head_ * args_.group + g, t + i);
        const float* const query = steps_.dtype->as_floats(row, args_.key_dim, keys_);
        float* const plain = queries_ + (t - first_ + i) * size + g * args_.key_dim;
        std::memcpy(plain, query, sizeof(float) * static_cast<std::size_t>(args_.key_dim));
        if (by_matrix_) to_pairs(reinterpret_cast<const bf16*>(row), i, pairs_ + int64_t{g} * args_.key_dim * width);
        else for (int d = 0; d < args_.key_dim; ++d) lanes_[(d * args_.group + g) * width + i] = query[d] * args_.scale;
      }
    }
  }

  // A query's dims two by two, in its column.
  void to_pairs(const bf16* query, int lane, bf16* pairs) const {
    for (int d = 0; d < args_.key_dim; ++d) pairs[(d / 2 * width + lane) * 2 + d % 2] = query[d];
  }

  // The lowest position that a query sees; nothing is as high as what padding sees.
  int oldest_of(int newest) const {
    if (newest < 0) return INT_MAX;
    return args_.window > 0 && newest >= args_.window ? newest - args_.window + 1 : 0;
  }

  // The first slot that any of the queries sees, as far as a window says.
  int first_seen(int t, int count) {
    for (int i = 0; i < width; ++i) oldest_[i] = i < count ? oldest_of(newest(t + i)) : INT_MAX;
    if (args_.window <= 0) return 0;
    int oldest = INT_MAX, from = 0;
    for (int i = 0; i < count; ++i) oldest = oldest_[i] < oldest ? oldest_[i] : oldest;
    while (from < cached_ + t && position_[from] < oldest) ++from;
    return from;
  }

  // Scores of a tile of slots, lane by lane. Behind `end` there is nothing to see.
  [[gnu::noinline]] void weigh_tile(int from, int begin, int end, int t) {
    const float* keys[slot_tile];
    Ints seen[slot_tile];
    for (int s = 0; s < slot_tile; ++s) {
      const int slot = from + s < end ? from + s : end - 1;
      keys[s] = steps_.dtype->as_floats(at(args_.key, args_.key_stride, head_, slot), args_.key_dim, keys_ + s * dim_stride_);
      seen[s] = from + s < end ? who_sees(slot, t) : Ints{};
    }
    for_lanes(args_.group, [&](int g, auto heads) {
      constexpr int count = slots_at_once<heads()>;
      for (int s = 0; s < slot_tile; s += count) {
        Floats sums[count][heads()];
        dot_lanes<heads(), count>(lanes_ + g * width, args_.group, keys + s, args_.key_dim, sums);
        for (int j = 0; j < count; ++j) {
          for (int h = 0; h < heads(); ++h) give(sums[j][h], seen[s + j], g + h, from - begin + s + j);
        }
      }
    });
  }

  // The same with a matrix unit.
  [[gnu::noinline]] void weigh_by_matrix(int from, int begin, int end, int t) {
    Ints seen[amx::keys_at_once];
    for (int s = 0; s < amx::keys_at_once; ++s) seen[s] = from + s < end ? who_sees(from + s, t) : Ints{};
    amx::Keys keys[amx::blocks];
    for (int i = 0; i < amx::blocks; ++i) keys[i] = rows_from(from + i * amx::rows, i);
    for (int g = 0; g < args_.group; ++g) {
      amx::dot(keys, pairs_ + int64_t{g} * args_.key_dim * width, args_.key_dim, scores_);
      for (int s = 0; s < amx::keys_at_once; ++s) give(load(scores_ + s * width) * args_.scale, seen[s], g, from - begin + s);
    }
  }

  // Keys of the slots from one on, as they lie; the last ones, behind which memory may end, in a copy.
  amx::Keys rows_from(int slot, int block) {
    if (slot + amx::rows <= args_.slots) return {at(args_.key, args_.key_stride, head_, slot), args_.key_stride[2] * steps_.dtype->size};
    const std::size_t bytes = sizeof(bf16) * static_cast<std::size_t>(args_.key_dim);
    bf16* const copy = rows_ + int64_t{block} * amx::rows * args_.key_dim;
    std::memset(copy, 0, amx::rows * bytes);
    for (int s = 0; slot + s < args_.slots; ++s) {
      std::memcpy(copy + int64_t{s} * args_.key_dim, at(args_.key, args_.key_stride, head_, slot + s), bytes);
    }
    return {copy, static_cast<int64_t>(bytes)};
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
    if (weighs_) {
      score = seen != 0 ? score : splat(-INFINITY);
      store(weights_ + (int64_t{slot} * args_.group + g) * width, score);
      store(tops_ + g * width, max(score, load(tops_ + g * width)));
    }
  }

  // What query head g gives joins what those before it gave.
  Floats join(Floats old, Floats x, int g) const {
    if (g > 0) x = steps_.group == Group::max ? (old > x || old != old ? old : x) : old + x;
    return steps_.group == Group::mean && g == args_.group - 1 ? x / static_cast<float>(args_.group) : x;
  }

  // Scores become exponentials, and totals_ what these are to be multiplied by; tile by tile, so that values are added up by what is
  // at hand still.
  void exponentiate(int begin, int slots) {
    for (int g = 0; g < args_.group; ++g) {
      store(totals_ + g * width, args_.sinks ? exp(args_.sinks[head_ * args_.group + g] - load(tops_ + g * width)) : Floats{});
    }
    if (attends_) std::memset(out_, 0, sizeof(float) * static_cast<std::size_t>(value_stride_ * args_.group * width));
    for (int from = 0; from < slots; from += value_tile) {
      const int count = slots - from < value_tile ? slots - from : value_tile;
      float* const weights = weights_ + int64_t{from} * args_.group * width;
      exponentiate_tile(weights, count);
      if (attends_) add_values(weights, begin + from, count);
    }
    for (int g = 0; g < args_.group; ++g) {
      const Floats total = load(totals_ + g * width);
      store(totals_ + g * width, total == 0.0f ? Floats{} : 1.0f / total);  // what sees nothing, as padding does, gives nothing
    }
  }

  [[gnu::noinline]] void exponentiate_tile(float* weights, int slots) {
    for (int g = 0; g < args_.group; ++g) {
      const Floats top = load(tops_ + g * width);
      Floats total = load(totals_ + g * width);
      for (int s = 0; s < slots; ++s) {
        float* const at = weights + (int64_t{s} * args_.group + g) * width;
        const Floats weight = exp(load(at) - top);
        store(at, weight);
        total += weight;
      }
      store(totals_ + g * width, total);
    }
  }

  // The values of slots from one on, times their weights.
  [[gnu::noinline]] void add_values(const float* weights, int from, int slots) {
    for (int s = 0; s < slots; ++s) {
      float* const to = values_ + s * value_stride_;
      const float* const row = steps_.dtype->as_floats(at(args_.value, args_.value_stride, head_, from + s), args_.value_dim, to);
      if (row != to) std::memcpy(to, row, sizeof(float) * static_cast<std::size_t>(args_.value_dim));
      for (int64_t d = args_.value_dim; d < value_stride_; ++d) to[d] = 0.0f;
    }
    for_lanes(args_.group, [&](int g, auto heads) {
      constexpr int count = values_at_once<heads()>;
      for (int64_t v = 0; v < value_stride_; v += count) {
        add_lanes<heads(), count>(weights + g * width, args_.group, values_ + v, value_stride_, slots,
                                  out_ + (v * args_.group + g) * width);
      }
    });
  }

  // The output of queries t to t + count.
  void write(int t, int count) {
    float* const pairs = out_row_ + round_up(args_.value_dim, pair);
    const int64_t bytes = int64_t{args_.value_dim} * steps_.dtype->size;
    for (int g = 0; g < args_.group; ++g) {
      for (int i = 0; i < count; ++i) {
        for (int64_t v = 0; v < args_.value_dim; ++v) out_row_[v] = out_[(v * args_.group + g) * width + i];
        steps_.dtype->pack(out_row_, args_.value_dim, pairs);
        const int64_t row = (int64_t{row_} * args_.tokens + t + i) * args_.kv_heads * args_.group + head_ * args_.group + g;
        steps_.dtype->write(pairs, totals_[g * width + i], args_.value_dim, static_cast<char*>(prompt_.out) + row * bytes);
      }
    }
  }

  // Probabilities, reduced over the group.
  [[gnu::noinline]] void reduce(int slots, float* rows) {
    for (int i = 0; i < slots; ++i) {
      Floats attn{};
      for (int g = 0; g < args_.group; ++g) {
        attn = join(attn, load(weights_ + (int64_t{i} * args_.group + g) * width) * load(totals_ + g * width), g);
      }
      to_rows(attn, i, rows);
    }
  }

  // A slot's lanes into one row each.
  void to_rows(Floats lanes, int slot, float* rows) const {
    for (int i = 0; i < width; ++i) rows[i * slot_stride_ + slot] = lanes[i];
  }

  void observe(int t, int live) {
    const int from = from_[lanes_of(t)], row = t - first_;
    Query query;
    query.newest = newest(t);
    query.slots = cached_ + t + 1 - from;
    query.position = position_ + from;
    query.oldest = oldest_of(query.newest);
    query.window = args_.window;
    query.live = live;
    query.state = state_ + from;
    query.ring_rows = args_.ring_rows;
    query.column_stride = column_stride_;
    query.work = nullptr;
    query.work_stride = 0;
    query.params = params_of(args_, row_, head_);
    query.constant = constants_of(args_, head_);
    query.random_key = absorb(absorb(args_.seed, args_.layer), args_.head_offset + head_);
    query.attn = attn_ + row * slot_stride_;
    query.logit = logit_ + row * slot_stride_;
    query.query = queries_ + row * args_.group * args_.key_dim;
    query.group = args_.group;
    query.key_dim = args_.key_dim;
    query.value_dim = args_.value_dim;
    query.keys = layout(args_.key, args_.key_stride, from);
    query.values = layout(args_.value, args_.value_stride, from);
    steps_.observe(query);
  }

  const DecodeArgs& args_;
  const PromptArgs& prompt_;
  const Steps& steps_;
  int row_, head_;
  int first_, end_;
  int cached_;         // slots in front of the new tokens'
  int64_t dim_stride_;
  bool attends_;       // whether the queries attend here
  bool weighs_;        // whether anybody asks for their probabilities
  int64_t value_stride_;
  bool by_matrix_;
  int slots_together_;
  int64_t slot_stride_;
  const int32_t* position_;
  float* state_;
  int64_t column_stride_;
  float* queries_;     // [query_block, group, key_dim]
  float* lanes_;       // [key_dim, group, width]
  float* tops_;        // [group, width] the highest scores
  float* keys_;        // [slot_tile, dim_stride] a tile's, where they are not floats already
  bf16* pairs_;        // [group, key_dim / 2, width, 2] queries for the matrix unit,
  bf16* rows_;         // [keys_at_once, key_dim] copies of its last keys,
  float* scores_;      // [keys_at_once, width] and what it gives
  float* weights_;     // [slots, group, width] scores, then exponentials
  float* totals_;      // [group, width] their sums, then 1 / these
  float* values_;      // [value_tile, value_stride] a tile's
  float* out_;         // [value_stride, group, width]
  float* out_row_;     // a query's, in order and in pairs
  float* logit_lanes_; // [slots, width]
  float* attn_;        // [query_block, slot_stride]
  float* logit_;
  float* sums_;        // [columns, slots] of the blocks before
  int64_t bytes_;
  int32_t oldest_[width];
  int from_[query_block / width];  // of every `width` queries the first slot that any of them sees
};

}  // namespace

int prefill(const DecodeArgs& args, const PromptArgs& prompt, const Steps& steps) {
  if (prompt.out && by_matrix(args, steps)) return elsewhere;  // values meet no matrix unit here, as they do in torch
  const int begin = prompt.out ? 0 : prompt.first;
  const int heads = args.batch * args.kv_heads, blocks = (args.tokens - begin + query_block - 1) / query_block;
  const int64_t workspace = PromptBlock(args, prompt, steps, 0, 0, 0, Arena(nullptr)).bytes();
  Turns turns(heads);
  if (!turns) return out_of_memory;
  std::atomic<int> taken{0};
  int status = ok;
// Blocks are taken in the order of the text, so that whoever waits for its turn waits for a thread that is at work.
#pragma omp parallel num_threads(args.threads > 1 ? args.threads : 1) reduction(| : status)
  for (int task; (task = taken.fetch_add(1)) < heads * blocks;) {
    const int head = task % heads, number = task / heads, first = begin + number * query_block;
    const int end = args.tokens - first < query_block ? args.tokens : first + query_block;
    char* const memory = thread_buffer().reserve(workspace);
    PromptBlock block(args, prompt, steps, head, first, end, Arena(memory));
    if (memory) block.attend();
    turns.wait(head, number);
    if (memory) block.fold();
    else status |= out_of_memory;
    turns.pass(head);
  }
  return status;
}

}  // namespace kvdsl
