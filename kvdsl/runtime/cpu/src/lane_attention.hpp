// Attention of `width` queries of a prompt, each in a lane of its own: so keys and values are read as they lie in memory, one
// number after the other, and the group's heads are reduced lane by lane. In bfloat16 two numbers at a time, or many by a matrix
// unit, where there are such instructions.
#pragma once

#include <cfloat>
#include <climits>
#include <cstdint>
#include <cstring>

#include <kvdsl/prompt.hpp>

#include "amx.hpp"
#include "arena.hpp"
#include "lanes.hpp"

namespace kvdsl {

// Slots whose scores are found together, in parts that keep the registers full of sums.
constexpr int slot_tile = 24;
// Slots whose values are added up together, for all of a head's values: both stay in the first-level cache.
constexpr int value_tile = 64;

// How products are found.
enum class Products { floats, pairs, matrix };

inline Products products_by(const DecodeArgs& args, const Steps& steps) {
  if (steps.dtype != &bfloat16) return Products::floats;
  if (args.key_dim % amx::dims_at_once == 0 && amx::lent()) return Products::matrix;
  return two_by_two && args.key_dim % 2 == 0 ? Products::pairs : Products::floats;
}

// A KV head of a row, and where what is told of the prompt has what is its own.
struct PromptHead {
  const DecodeArgs& args;
  const PromptArgs& prompt;
  const Steps& steps;
  int number;  // of all rows' heads
  int row = number / args.kv_heads, head = number % args.kv_heads;
  int cached = args.slots - args.tokens;  // slots in front of the new tokens'
  const int32_t* position = args.position + int64_t{number} * args.slots;

  int newest(int t) const { return prompt.newest[int64_t{row} * args.tokens + t]; }

  // The lowest position that a query sees; nothing is as high as what padding sees.
  int oldest_of(int newest) const {
    if (newest < 0) return INT_MAX;
    return args.window > 0 && newest >= args.window ? newest - args.window + 1 : 0;
  }

  template <class X>
  const char* at(const X* base, const int64_t (&stride)[3], int which, int index) const {
    return static_cast<const char*>(base) + (row * stride[0] + which * stride[1] + index * stride[2]) * steps.dtype->size;
  }

  const void* key_of(int slot) const { return at(args.key, args.key_stride, head, slot); }
  const void* value_of(int slot) const { return at(args.value, args.value_stride, head, slot); }

  // The rows of the slots from one on.
  Layout layout(const void* base, const int64_t (&stride)[3], int from) const {
    return {const_cast<char*>(at(base, stride, head, from)), stride[2] * steps.dtype->size};
  }
};

// What some queries attend to, and what they give the slots.
class LaneAttention {
 public:
  LaneAttention(const PromptHead& head, Arena& arena)
      : of_(head), args_(head.args), steps_(head.steps), attends_(head.prompt.out != nullptr),
        weighs_(attends_ || steps_.needs_attn), by_(products_by(args_, steps_)),
        slots_together_(by_ == Products::matrix ? amx::keys_at_once : slot_tile), dim_stride_(round_up(args_.key_dim, pair)),
        value_stride_(round_up(args_.value_dim, value_pad)), room_(round_up(args_.slots, slots_together_) + width) {
    const int64_t lanes = int64_t{args_.group} * width;
    const bool pairs = by_ == Products::pairs, matrix = by_ == Products::matrix;
    lanes_ = arena.take<float>(pairs || matrix ? 0 : lanes * args_.key_dim);
    pairs_ = arena.take<bf16>(pairs || matrix ? lanes * args_.key_dim : 0);
    tops_ = arena.take<float>(lanes);
    keys_ = arena.take<float>(slot_tile * dim_stride_);
    rows_ = arena.take<bf16>(matrix ? int64_t{amx::keys_at_once} * args_.key_dim : 0);
    scores_ = arena.take<float>(matrix ? amx::keys_at_once * width : 0);
    weights_ = arena.take<float>(weighs_ ? room_ * lanes : 0);
    totals_ = arena.take<float>(lanes);
    values_ = arena.take<float>(attends_ ? value_tile * value_stride_ : 0);
    two_values_ = arena.take<Two>(attends_ && pairs ? value_tile / 2 * value_stride_ : 0);
    two_weights_ = arena.take<Two>(attends_ && pairs ? value_tile / 2 * lanes : 0);
    out_ = arena.take<float>(attends_ ? value_stride_ * lanes : 0);
    out_row_ = arena.take<float>(attends_ ? 2 * round_up(args_.value_dim, pair) : 0);
    logits_ = arena.take<float>(steps_.needs_logit ? room_ * width : 0);
  }

  Products by() const { return by_; }

  // Slots that a row of `reduce` has room for.
  int64_t room() const { return room_; }

  // Queries t to t + count: writes their output if there is somewhere to, and leaves what they give the slots. Returns the first
  // slot that any of them sees.
  //
  // queries: [count, group, key_dim], gets them in order.
  int attend(int t, int count, float* queries) {
    read_queries(t, count, queries);
    const int begin = first_seen(t, count), end = of_.cached + t + count;
    if (weighs_ || steps_.needs_logit) {
      for (int from = begin; from < end; from += slots_together_) {
        if (by_ == Products::matrix) weigh_by_matrix(from, begin, end, t);
        else if (by_ == Products::pairs) weigh_tile<Two>(from, begin, end, t);
        else weigh_tile<float>(from, begin, end, t);
      }
    }
    if (weighs_) {
      exponentiate(begin, end - begin);
      if (attends_) write(t, count);
    }
    return begin;
  }

  // Probabilities, reduced over the group: rows of so many slots, one of `room` numbers for every lane.
  [[gnu::noinline]] void reduce(int slots, float* rows) {
    for (int i = 0; i < slots; ++i) {
      Floats attn{};
      for (int g = 0; g < args_.group; ++g) {
        attn = join(attn, load(weights_ + (int64_t{i} * args_.group + g) * width) * load(totals_ + g * width), g);
      }
      to_rows(attn, i, rows);
    }
  }

  void reduce_logits(int slots, float* rows) const {
    for (int i = 0; i < slots; ++i) to_rows(load(logits_ + int64_t{i} * width), i, rows);
  }

 private:
  // The queries in order, for the policy; and lane by lane.
  void read_queries(int t, int count, float* queries) {
    const int size = args_.group * args_.key_dim;
    if (by_ != Products::floats) std::memset(pairs_, 0, sizeof(bf16) * static_cast<std::size_t>(size * width));
    else std::memset(lanes_, 0, sizeof(float) * static_cast<std::size_t>(size * width));
    for (int g = 0; g < args_.group; ++g) {  // a learned sink's logit takes part; without one whatever is seen is higher
      const float sink = args_.sinks ? args_.sinks[of_.head * args_.group + g] : -FLT_MAX;
      store(tops_ + g * width, splat(sink > -FLT_MAX ? sink : -FLT_MAX));
    }
    for (int i = 0; i < count; ++i) {
      for (int g = 0; g < args_.group; ++g) {
        const char* const row = of_.at(args_.query, args_.query_stride, of_.head * args_.group + g, t + i);
        const float* const query = steps_.dtype->as_floats(row, args_.key_dim, keys_);
        float* const plain = queries + i * size + g * args_.key_dim;
        std::memcpy(plain, query, sizeof(float) * static_cast<std::size_t>(args_.key_dim));
        if (by_ != Products::floats) to_pairs(reinterpret_cast<const bf16*>(row), i, pairs_ + int64_t{g} * args_.key_dim * width);
        else for (int d = 0; d < args_.key_dim; ++d) lanes_[(int64_t{g} * args_.key_dim + d) * width + i] = query[d];
      }
    }
  }

  // A query's dims two by two, in its column.
  void to_pairs(const bf16* query, int lane, bf16* pairs) const {
    for (int d = 0; d < args_.key_dim; ++d) pairs[(d / 2 * width + lane) * 2 + d % 2] = query[d];
  }

  // The first slot that any of the queries sees, as far as a window says.
  int first_seen(int t, int count) {
    for (int i = 0; i < width; ++i) oldest_[i] = i < count ? of_.oldest_of(of_.newest(t + i)) : INT_MAX;
    if (args_.window <= 0) return 0;
    int oldest = INT_MAX, from = 0;
    for (int i = 0; i < count; ++i) oldest = oldest_[i] < oldest ? oldest_[i] : oldest;
    while (from < of_.cached + t && of_.position[from] < oldest) ++from;
    return from;
  }

  // Scores of a tile of slots, lane by lane. Behind `end` there is nothing to see.
  template <class X>
  [[gnu::noinline]] void weigh_tile(int from, int begin, int end, int t) {
    constexpr bool twos = std::is_same_v<X, Two>;
    const void* const lanes = twos ? static_cast<const void*>(pairs_) : lanes_;
    const int dims = twos ? args_.key_dim / 2 : args_.key_dim;
    const X* keys[slot_tile];
    Ints seen[slot_tile];
    for (int s = 0; s < slot_tile; ++s) {
      const int slot = from + s < end ? from + s : end - 1;
      const void* key = of_.key_of(slot);
      if (!twos) key = steps_.dtype->as_floats(key, args_.key_dim, keys_ + s * dim_stride_);
      keys[s] = static_cast<const X*>(key);
      seen[s] = from + s < end ? who_sees(slot, t) : Ints{};
    }
    for_lanes(args_.group, [&](int g, auto heads) {
      constexpr int count = slots_at_once<heads()>;
      for (int s = 0; s < slot_tile; s += count) {
        Floats sums[count][heads()];
        const int64_t stride = int64_t{dims} * width;
        dot_lanes<heads(), count>(static_cast<const X*>(lanes) + g * stride, stride, keys + s, dims, sums);
        for (int j = 0; j < count; ++j) {
          for (int h = 0; h < heads(); ++h) give(sums[j][h] * args_.scale, seen[s + j], g + h, from - begin + s + j);
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
  amx::Keys rows_from(int slot, int index) {
    if (slot + amx::rows <= args_.slots) return {of_.key_of(slot), args_.key_stride[2] * steps_.dtype->size};
    const std::size_t bytes = sizeof(bf16) * static_cast<std::size_t>(args_.key_dim);
    bf16* const copy = rows_ + int64_t{index} * amx::rows * args_.key_dim;
    std::memset(copy, 0, amx::rows * bytes);
    for (int s = 0; slot + s < args_.slots; ++s) {
      std::memcpy(copy + int64_t{s} * args_.key_dim, of_.key_of(slot + s), bytes);
    }
    return {copy, static_cast<int64_t>(bytes)};
  }

  // A mask of the lanes whose queries see the slot.
  Ints who_sees(int slot, int t) const {
    return (load_as<Ints>(oldest_) <= of_.position[slot]) & (own_lanes() + (of_.cached + t) >= slot);
  }

  static Ints own_lanes() {
    Ints lanes;
    for (int i = 0; i < width; ++i) lanes[i] = i;
    return lanes;
  }

  void give(Floats score, Ints seen, int g, int slot) {
    if (args_.softcap > 0) score = args_.softcap * tanh(score / args_.softcap);
    if (steps_.needs_logit) {
      float* const to = logits_ + int64_t{slot} * width;
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

  // Scores become exponentials, and totals_ what these are to be multiplied by; tile by tile, so that values are added up by what
  // is at hand still.
  void exponentiate(int begin, int slots) {
    for (int g = 0; g < args_.group; ++g) {
      store(totals_ + g * width, args_.sinks ? exp(args_.sinks[of_.head * args_.group + g] - load(tops_ + g * width)) : Floats{});
    }
    if (attends_) std::memset(out_, 0, sizeof(float) * static_cast<std::size_t>(value_stride_ * args_.group * width));
    for (int from = 0; from < slots; from += value_tile) {
      const int count = slots - from < value_tile ? slots - from : value_tile;
      float* const weights = weights_ + int64_t{from} * args_.group * width;
      exponentiate_tile(weights, count);
      if (attends_) add_values(weights, begin + from, count);
    }
    for (int g = 0; g < args_.group; ++g) store(totals_ + g * width, 1.0f / load(totals_ + g * width));
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
    if (by_ == Products::pairs) {
      pair_values(weights, from, slots);
      add_values(two_weights_, two_values_, (slots + 1) / 2);
      return;
    }
    for (int s = 0; s < slots; ++s) {
      float* const to = values_ + s * value_stride_;
      const float* const row = steps_.dtype->as_floats(of_.value_of(from + s), args_.value_dim, to);
      if (row != to) std::memcpy(to, row, sizeof(float) * static_cast<std::size_t>(args_.value_dim));
      for (int64_t d = args_.value_dim; d < value_stride_; ++d) to[d] = 0.0f;
    }
    add_values(weights, values_, slots);
  }

  template <class X>
  void add_values(const X* weights, const X* values, int slots) {
    for_lanes(args_.group, [&](int g, auto heads) {
      constexpr int count = values_at_once<heads()>;
      for (int64_t v = 0; v < value_stride_; v += count) {
        add_lanes<heads(), count>(weights + g * width, args_.group, values + v, value_stride_, slots,
                                  out_ + (v * args_.group + g) * width);
      }
    });
  }

  // The same weights and values, those of two slots side by side; behind an odd one there is nothing.
  void pair_values(const float* weights, int from, int slots) {
    const int size = args_.group * width;
    for (int s = 0; s < slots; s += 2) {
      const bool last = s + 1 == slots;
      const bf16* const first = static_cast<const bf16*>(of_.value_of(from + s));
      const bf16* const second = static_cast<const bf16*>(of_.value_of(from + s + !last));
      Two* const to = two_values_ + s / 2 * value_stride_;
      for (int d = 0; d < args_.value_dim; ++d) to[d] = two(first[d], second[d]);
      for (int64_t d = args_.value_dim; d < value_stride_; ++d) to[d] = {};
      for (int i = 0; i < size; i += width) {
        const float* const own = weights + int64_t{s} * size + i;
        store(reinterpret_cast<float*>(two_weights_ + s / 2 * size + i),
              reinterpret_cast<Floats>(two(load(own), last ? Floats{} : load(own + size))));
      }
    }
  }

  // The output of queries t to t + count.
  void write(int t, int count) {
    float* const pairs = out_row_ + round_up(args_.value_dim, pair);
    const int64_t bytes = int64_t{args_.value_dim} * steps_.dtype->size;
    for (int g = 0; g < args_.group; ++g) {
      for (int i = 0; i < count; ++i) {
        for (int64_t v = 0; v < args_.value_dim; ++v) out_row_[v] = out_[(v * args_.group + g) * width + i];
        steps_.dtype->pack(out_row_, args_.value_dim, pairs);
        const int64_t row = (int64_t{of_.row} * args_.tokens + t + i) * args_.kv_heads * args_.group + of_.head * args_.group + g;
        const float factor = of_.newest(t + i) < 0 ? 0.0f : totals_[g * width + i];  // padding sees nothing
        steps_.dtype->write(pairs, factor, args_.value_dim, static_cast<char*>(of_.prompt.out) + row * bytes);
      }
    }
  }

  // A slot's lanes into one row each.
  void to_rows(Floats lanes, int slot, float* rows) const {
    for (int i = 0; i < width; ++i) rows[i * room_ + slot] = lanes[i];
  }

  const PromptHead& of_;
  const DecodeArgs& args_;
  const Steps& steps_;
  bool attends_;        // whether the queries attend here
  bool weighs_;         // whether anybody asks for their probabilities
  Products by_;
  int slots_together_;
  int64_t dim_stride_, value_stride_, room_;
  float* lanes_;        // [group, key_dim, width] queries,
  bf16* pairs_;         // or [group, key_dim / 2, width, 2]
  float* tops_;         // [group, width] the highest scores
  float* keys_;         // [slot_tile, dim_stride] a tile's, where they are not floats already
  bf16* rows_;          // [keys_at_once, key_dim] copies of the matrix unit's last keys,
  float* scores_;       // [keys_at_once, width] and what it gives
  float* weights_;      // [slots, group, width] scores, then exponentials
  float* totals_;       // [group, width] their sums, then 1 / these
  float* values_;       // [value_tile, value_stride] a tile's,
  Two* two_values_;     // [value_tile / 2, value_stride] or those of two slots side by side,
  Two* two_weights_;    // [value_tile / 2, group, width] and their weights
  float* out_;          // [value_stride, group, width]
  float* out_row_;      // a query's, in order and in pairs
  float* logits_;       // [slots, width]
  int32_t oldest_[width];
};

}  // namespace kvdsl
