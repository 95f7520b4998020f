// Attention of a prompt's queries, each in a lane of its own, `width` of them a tile: so keys and values are read as they lie in
// memory, one number after the other, and the group's heads are reduced lane by lane.
//
// Slots come in rounds. A round's scores become exponentials over the highest score so far; where a later round has a much higher
// one, what was added up before is brought down to it. So only those whose probabilities are observed leave more than a round's behind.
#pragma once

#include <cfloat>
#include <climits>
#include <cstdint>
#include <cstring>

#include "arena.hpp"
#include "lanes.hpp"
#include "prompt_head.hpp"
#include "round.hpp"

namespace kvdsl {

// Queries of a block. What they give is added up before it joins the others': among many thousands it would be rounded away.
constexpr int query_block = 64;

// How far a score may lie above the one over which exponentials are, before these begin anew over it: seldom, since bringing down what
// was added up takes time and rounds it once more. e^slack is far from overflowing, however many are added up.
constexpr float slack = 8.0f;

// `width` queries.
struct LaneTile {
  int t, count;     // the first, and how many there are
  int begin, end;   // the slots that any of them sees, if there are any
  Two* queries;     // [group, words, width] floats, or two of bf16; the last head's whole vectors of words reach beyond
  float* tops;      // [group, width] the highest scores so far, or at most `slack` less
  float* totals;    // [group, width] sums of exponentials over these, in the end 1 / the sums
  float* out;       // [value_stride, group, width]
  int32_t oldest[width];  // the lowest position that a query sees
};

// What some queries attend to, and what they give the slots.
class LaneAttention {
 public:
  LaneAttention(const PromptHead& head, Arena& arena)
      : of_(head), args_(head.args), steps_(head.steps), attends_(head.prompt.out != nullptr),
        weighs_(attends_ || steps_.needs_attn), by_(products_by(args_, steps_)), lanes_(int64_t{args_.group} * width),
        words_(by_ == Products::floats ? args_.key_dim : args_.key_dim / 2), word_stride_(round_up(words_, width)),
        size_(slots_of_round(by_)), room_(round_up(args_.slots, size_) + size_), round_(head, by_, attends_, arena) {
    for (LaneTile& tile : tiles_) {
      tile.queries = arena.take<Two>(lanes_ * words_ + width * width);
      tile.tops = arena.take<float>(lanes_);
      tile.totals = arena.take<float>(lanes_);
      tile.out = arena.take<float>(attends_ ? round_.value_stride() * lanes_ : 0);
    }
    const bool observes = head.prompt.first < args_.tokens;
    weights_ = arena.take<float>((observes && steps_.needs_attn ? room_ : size_) * lanes_);
    two_weights_ = arena.take<Two>(by_ == Products::floats ? 0 : size_ / 2 * lanes_);
    round_tops_ = arena.take<float>(observes && steps_.needs_attn ? room_ / size_ * lanes_ : 0);
    logits_ = arena.take<float>(observes && steps_.needs_logit ? room_ * width : 0);
    factors_ = arena.take<float>(lanes_);
    query_ = arena.take<float>(round_up(args_.key_dim, pair));
    queries_ = arena.take<Two>(word_stride_ * width);
    rows_ = arena.take<float>(attends_ ? round_.value_stride() * width : 0);
  }

  Products by() const { return by_; }

  // Slots that a row of `reduce` has room for.
  int64_t room() const { return room_; }

  // Queries t to t + count, at most a block, or, if they are observed, a tile: writes their output if there is somewhere to, and
  // leaves what they give the slots. Returns the first slot that any of them sees.
  //
  // queries: [count, group, key_dim], gets them in order.
  int attend(int t, int count, bool observed, float* queries) {
    observed_ = observed;
    const int end = of_.cached + t + count, tiles = (count + width - 1) / width;
    begin_ = end;
    for (int i = 0; i < tiles; ++i) {
      const int first = i * width;
      start(tiles_[i], t + first, count - first < width ? count - first : width, queries + first * args_.group * args_.key_dim);
      begin_ = tiles_[i].begin < begin_ ? tiles_[i].begin : begin_;
    }
    for (int from = begin_; from < end; from += size_) {
      const int slots = end - from < size_ ? end - from : size_;
      round_.read(from, slots);
      for (int i = 0; i < tiles; ++i) {
        if (from < tiles_[i].end && from + slots > tiles_[i].begin) meet(tiles_[i], from);
      }
    }
    for (int i = 0; weighs_ && i < tiles; ++i) finish(tiles_[i]);
    return begin_;
  }

  // Probabilities of a tile that was observed, reduced over the group: rows of so many slots, one of `room` numbers for every lane.
  [[gnu::noinline]] void reduce(int slots, float* rows) {
    const LaneTile& tile = tiles_[0];
    for (int from = 0; from < slots; from += size_) {
      for (int g = 0; g < args_.group; ++g) {
        const Floats down = exp(load(round_tops_ + from / size_ * lanes_ + g * width) - load(tile.tops + g * width));
        store(factors_ + g * width, down * load(tile.totals + g * width));
      }
      for (int s = from; s < slots && s < from + size_; s += width) {
        Floats attn[width] = {};
        for (int g = 0; g < args_.group; ++g) {
          const float* const weights = weights_ + s * lanes_ + g * width;
          const Floats factor = load(factors_ + g * width);
          for (int i = 0; i < width; ++i) attn[i] = join(attn[i], load(weights + i * lanes_) * factor, g);
        }
        turn(reinterpret_cast<const float*>(attn), width, rows + s, room_);
      }
    }
  }

  void reduce_logits(int slots, float* rows) const {
    for (int s = 0; s < slots; s += width) turn(logits_ + int64_t{s} * width, width, rows + s, room_);
  }

 private:
  // Queries t to t + count, which have met no slot yet.
  void start(LaneTile& tile, int t, int count, float* queries) {
    tile.t = t, tile.count = count, tile.end = of_.cached + t + count;
    read_queries(tile, queries);
    for (int i = 0; i < width; ++i) tile.oldest[i] = i < count ? of_.oldest_of(of_.newest(t + i)) : INT_MAX;
    tile.begin = first_seen(tile);
    for (int g = 0; g < args_.group; ++g) {  // a learned sink's logit takes part; without one whatever is seen is higher
      const float sink = args_.sinks ? args_.sinks[of_.head * args_.group + g] : -INFINITY, top = sink > -FLT_MAX ? sink : -FLT_MAX;
      store(tile.tops + g * width, splat(top));
      store(tile.totals + g * width, splat(exp(sink - top)));
    }
    if (attends_) std::memset(tile.out, 0, sizeof(float) * static_cast<std::size_t>(round_.value_stride() * lanes_));
  }

  // The queries in lanes; and in order, where the policy observes them.
  void read_queries(LaneTile& tile, float* queries) {
    const int dims = args_.key_dim;
    const std::size_t bytes = sizeof(Two) * static_cast<std::size_t>(words_);
    if (tile.count < width) std::memset(queries_, 0, sizeof(Two) * static_cast<std::size_t>(word_stride_ * width));
    for (int g = 0; g < args_.group; ++g) {
      for (int i = 0; i < tile.count; ++i) {
        const char* const row = of_.at(args_.query, args_.query_stride, of_.head * args_.group + g, tile.t + i);
        const bool floats = by_ == Products::floats;
        const float* const plain = floats || observed_ ? steps_.dtype->as_floats(row, dims, query_) : nullptr;
        std::memcpy(queries_ + i * word_stride_, floats ? static_cast<const void*>(plain) : row, bytes);
        if (!observed_) continue;
        std::memcpy(queries + (int64_t{i} * args_.group + g) * dims, plain, sizeof(float) * static_cast<std::size_t>(dims));
      }
      Two* const lanes = tile.queries + int64_t{g} * words_ * width;
      for (int w = 0; w < words_; w += width) turn(queries_ + w, word_stride_, lanes + w * width, width);
    }
  }

  // The first slot that any of the queries sees: behind padding, and as far back as a window says; INT_MAX if all are padding. So a
  // row's rounds begin with its text, and without a window it gets the same bits however far it is padded.
  int first_seen(const LaneTile& tile) const {
    int oldest = INT_MAX, from = 0;
    for (int i = 0; i < tile.count; ++i) oldest = tile.oldest[i] < oldest ? tile.oldest[i] : oldest;
    if (oldest == INT_MAX) return INT_MAX;
    while (of_.position[from] < oldest) ++from;  // they see themselves
    return from;
  }

  // The queries attend to the round's slots.
  void meet(LaneTile& tile, int from) {
    const bool kept = observed_ && steps_.needs_attn;
    const int at = from - begin_, slots = round_.scored();
    float* const weights = weights_ + (kept ? at : 0) * lanes_;
    round_.dot(tile.queries, weights);
    Ints seen[longest_round];
    for (int s = 0; s < slots; ++s) seen[s] = from + s < tile.end ? who_sees(tile, from + s) : Ints{};
    for (int g = 0; g < args_.group; ++g) {
      const Floats highest = mask(seen, weights, slots, observed_ && steps_.needs_logit ? logits_ + int64_t{at} * width : nullptr, g);
      if (weighs_) exponentiate(tile, highest, weights, slots, g);
    }
    if (kept) std::memcpy(round_tops_ + at / size_ * lanes_, tile.tops, sizeof(float) * static_cast<std::size_t>(lanes_));
    if (attends_) round_.add(by_ == Products::floats ? static_cast<const void*>(weights) : two_weights_, tile.out);
  }

  // A mask of the lanes whose queries see the slot.
  Ints who_sees(const LaneTile& tile, int slot) const {
    return (load_as<Ints>(tile.oldest) <= of_.position[slot]) & (own_lanes() + (of_.cached + tile.t) >= slot);
  }

  static Ints own_lanes() {
    Ints lanes;
    for (int i = 0; i < width; ++i) lanes[i] = i;
    return lanes;
  }

  // Products of query head g become scores, -inf where a slot is not seen. Returns the highest.
  [[gnu::noinline]] Floats mask(const Ints* seen, float* scores, int slots, float* logits, int g) const {
    Floats highest = splat(-FLT_MAX);
    for (int s = 0; s < slots; ++s) {
      float* const at = scores + s * lanes_ + g * width;
      Floats score = load(at) * args_.scale;
      if (args_.softcap > 0) score = args_.softcap * tanh(score / args_.softcap);
      if (logits) store(logits + s * width, join(load(logits + s * width), score, g));
      score = seen[s] != 0 ? score : splat(-INFINITY);
      store(at, score);
      highest = max(score, highest);
    }
    return highest;
  }

  // Scores of query head g become exponentials over the highest so far, or nearly; what was added up over a lower one is brought down.
  [[gnu::noinline]] void exponentiate(LaneTile& tile, Floats highest, float* weights, int slots, int g) {
    const Floats before = load(tile.tops + g * width), top = highest > before + slack ? highest : before;
    Floats total = load(tile.totals + g * width);
    if (any(top != before)) {
      const Floats down = exp(before - top);
      total *= down;
      for (int64_t v = 0; attends_ && v < round_.value_stride(); ++v) {
        float* const at = tile.out + v * lanes_ + g * width;
        store(at, load(at) * down);
      }
    }
    for (int s = 0; s < slots; s += 2) {
      float* const at = weights + s * lanes_ + g * width;
      const Floats one = exp_below_80(load(at) - top), other = exp_below_80(load(at + lanes_) - top);
      store(at, one);
      store(at + lanes_, other);
      if (by_ != Products::floats) store(two_weights_ + s / 2 * lanes_ + g * width, two(one, other));
      total += one;
      total += other;
    }
    store(tile.tops + g * width, top);
    store(tile.totals + g * width, total);
  }

  // What query head g gives joins what those before it gave.
  Floats join(Floats old, Floats x, int g) const {
    if (g > 0) x = steps_.group == Group::max ? (old > x || old != old ? old : x) : old + x;
    return steps_.group == Group::mean && g == args_.group - 1 ? x / static_cast<float>(args_.group) : x;
  }

  void finish(LaneTile& tile) {
    for (int g = 0; g < args_.group; ++g) store(tile.totals + g * width, 1.0f / load(tile.totals + g * width));
    if (attends_) write(tile);
  }

  void write(const LaneTile& tile) {
    const int64_t stride = round_.value_stride(), bytes = int64_t{args_.value_dim} * steps_.dtype->size;
    for (int g = 0; g < args_.group; ++g) {
      for (int64_t v = 0; v < stride; v += width) turn(tile.out + v * lanes_ + g * width, lanes_, rows_ + v, stride);
      for (int i = 0; i < tile.count; ++i) {
        const int64_t token = int64_t{of_.row} * args_.tokens + tile.t + i;
        const int64_t row = token * args_.kv_heads * args_.group + of_.head * args_.group + g;
        const float factor = of_.newest(tile.t + i) < 0 ? 0.0f : tile.totals[g * width + i];  // padding sees nothing
        steps_.dtype->from_floats(rows_ + i * stride, factor, args_.value_dim, static_cast<char*>(of_.prompt.out) + row * bytes);
      }
    }
  }

  const PromptHead& of_;
  const DecodeArgs& args_;
  const Steps& steps_;
  bool attends_;        // whether the queries attend here
  bool weighs_;         // whether anybody asks for their probabilities
  Products by_;
  int64_t lanes_;       // of a slot's weights
  int words_;           // of 32 bits: a query's floats, or its numbers two by two
  int64_t word_stride_;
  int size_;            // slots of a round
  int64_t room_;
  Round round_;
  LaneTile tiles_[query_block / width];
  bool observed_ = false;
  int begin_ = 0;       // the first slot that any of the queries sees
  float* weights_;      // [slots, group, width] scores, then exponentials; of a round, or of all slots where they are observed,
  float* round_tops_;   // [rounds, group, width] and the scores over which every round's are exponentials
  float* factors_;      // [group, width] of a round, by which its exponentials become probabilities
  Two* two_weights_;    // [size / 2, group, width] those of two slots side by side
  float* logits_;       // [slots, width]
  float* query_;        // [key_dim] where it is not floats already
  Two* queries_;        // [width, word_stride] one after the other
  float* rows_;         // [width, value_stride] the outputs of a tile and query head
};

}  // namespace kvdsl
