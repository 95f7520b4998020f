// Attention of a prompt's queries, each in a lane, `width` queries per tile. Keys and values are read in memory order,
// number by number, and the group's heads are reduced lane by lane.
//
// Slots are processed in rounds. A round's scores become exponentials relative to the highest score so far. If a later
// round has a much higher score, earlier sums are rescaled. So only observed probabilities are stored beyond a round.
//
// Exponentials are base 2, the cheapest: scores are in bits, multiplied by log2(e).
#pragma once

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "arena.hpp"
#include "lanes.hpp"
#include "prompt_head.hpp"
#include "round.hpp"

namespace kvdsl {

// Queries per block. A block is summed before it is added to the others: among many thousands it would be lost in
// rounding.
constexpr int query_block = 64;

constexpr float bits_of_1 = 1.44269504088896341f;  // log2(e)

// How many bits a score may exceed its reference before sums are rescaled. Rescaling is rare, since it costs time and
// one more rounding. 2^slack is far from overflow for any number of terms.
constexpr float slack = 12.0f;

// Beyond this many bits, scores are rounded before the highest is subtracted. Below, a fused multiply-add subtracts it
// from the unrounded product; the rounded highest may then be lower, by 8 bits at most.
constexpr float far = 268435456.0f;  // 2^28

// Upper bound of exponentials.
constexpr float most_weight = 2097152.0f;  // 2^21, above 2^(slack + 8)

// A tile of `width` queries.
struct LaneTile {
  int t, count;     // first query and number of queries
  int begin, end;   // range of slots that any of them sees
  Two* queries;     // [group, words, width] floats, or pairs of bf16; the last head's whole vectors of words reach beyond
  float* tops;      // [group, width] highest scores so far in bits, or at most `slack` less
  float* totals;    // [group, width] sums of exponentials relative to these; at the end 1 / sums
  float* out;       // [value_stride, group, width]
  int32_t oldest[width];  // lowest position that each query sees
  int32_t latest;         // the highest of these: all later queries see positions from here on
};

// Attention of some queries, with their probabilities if observed.
class LaneAttention {
 public:
  LaneAttention(const PromptHead& head, Products by, const TwoValues& values, Arena& arena)
      : of_(head), args_(head.args), steps_(head.steps), attends_(head.prompt.out != nullptr),
        weighs_(attends_ || steps_.needs_attn), by_(by), lanes_(int64_t{args_.group} * width),
        words_(by_ == Products::floats ? args_.key_dim : args_.key_dim / 2), word_stride_(round_up(words_, width)),
        size_(slots_of_round(by_)), room_(round_up(args_.slots, size_) + size_), round_(head, by, attends_ ? &values : nullptr, arena) {
    for (LaneTile& tile : tiles_) {
      tile.queries = arena.take<Two>(lanes_ * words_ + width * width);
      tile.tops = arena.take<float>(lanes_);
      tile.totals = arena.take<float>(lanes_);
      tile.out = arena.take<float>(attends_ ? round_.value_stride() * lanes_ : 0);
    }
    const bool observes = head.prompt.first < args_.tokens;
    scores_ = arena.take<float>(size_ * lanes_);
    weights_ = observes && steps_.needs_attn ? arena.take<float>(room_ * lanes_) : scores_;
    two_weights_ = arena.take<Two>(by_ == Products::floats ? 0 : size_ / 2 * lanes_);
    round_tops_ = arena.take<float>(observes && steps_.needs_attn ? room_ / size_ * lanes_ : 0);
    logits_ = arena.take<float>(observes && steps_.needs_logit ? room_ * width : 0);
    factors_ = arena.take<float>(lanes_);
    query_ = arena.take<float>(round_up(args_.key_dim, pair));
    queries_ = arena.take<Two>(word_stride_ * width);
    rows_ = arena.take<float>(attends_ ? round_.value_stride() * width : 0);
  }

  Products by() const { return by_; }

  // Slots per row of `reduce`.
  int64_t room() const { return room_; }

  // Attends for queries t to t + count, at most a block, or a tile if they are observed. Writes their output if there
  // is an `out`, and keeps their probabilities. Returns the first slot of the first round that any of them sees.
  //
  // queries: [count, group, key_dim], receives them in order.
  int attend(int t, int count, bool observed, float* queries) {
    observed_ = observed;
    const int end = of_.cached + t + count, tiles = (count + width - 1) / width;
    begin_ = end;
    for (int i = 0; i < tiles; ++i) {
      const int first = i * width;
      start(tiles_[i], t + first, count - first < width ? count - first : width, queries + first * args_.group * args_.key_dim);
      begin_ = tiles_[i].begin < begin_ ? tiles_[i].begin : begin_;
    }
    if (begin_ < end) begin_ -= (begin_ - of_.begin) % size_;
    for (int from = begin_; from < end; from += size_) {
      const int slots = end - from < size_ ? end - from : size_;
      round_.read(from, slots);
      const int lowest = slots == size_ ? lowest_position(from) : INT_MIN;
      for (int i = 0; i < tiles; ++i) {
        LaneTile& tile = tiles_[i];
        if (from >= tile.end || from + slots <= tile.begin) continue;
        meet(tile, from, tile.latest <= lowest && from + slots <= of_.cached + tile.t + 1);
      }
    }
    add_pending();
    for (int i = 0; weighs_ && i < tiles; ++i) finish(tiles_[i]);
    return begin_;
  }

  // Reduces the probabilities of an observed tile over the group: rows of so many slots, one of `room` numbers per
  // lane.
  [[gnu::noinline]] void reduce(int slots, float* rows) {
    const LaneTile& tile = tiles_[0];
    const float part = steps_.group == Group::mean ? 1.0f / static_cast<float>(args_.group) : 1.0f;
    for (int from = 0; from < slots; from += size_) {
      for (int g = 0; g < args_.group; ++g) {
        const Floats down = exp2(load(round_tops_ + from / size_ * lanes_ + g * width) - load(tile.tops + g * width));
        store(factors_ + g * width, down * load(tile.totals + g * width) * part);
      }
      for (int s = from; s < slots && s < from + size_; s += width) {
        Floats attn[width];
        if (steps_.group == Group::max) join_heads<true>(s, attn);
        else join_heads<false>(s, attn);
        turn(reinterpret_cast<const float*>(attn), width, rows + s, room_);
      }
    }
  }

  void reduce_logits(int slots, float* rows) const {
    for (int s = 0; s < slots; s += width) turn(logits_ + int64_t{s} * width, width, rows + s, room_);
  }

 private:
  // attn[i]: the maximum or sum over query heads for slot s + i.
  template <bool Highest>
  void join_heads(int s, Floats (&attn)[width]) const {
    const int64_t lanes = lanes_;
    for (int i = 0; i < width; ++i) attn[i] = Floats{};  // probabilities are at least 0
    for (int g = 0; g < args_.group; ++g) {
      const float* const weights = weights_ + s * lanes + g * width;
      const Floats factor = load(factors_ + g * width);
      for (int i = 0; i < width; ++i) {
        const Floats x = load(weights + i * lanes) * factor;
        if constexpr (Highest) attn[i] = attn[i] > x || attn[i] != attn[i] ? attn[i] : x;
        else attn[i] += x;
      }
    }
  }

  // Starts a tile with queries t to t + count.
  void start(LaneTile& tile, int t, int count, float* queries) {
    tile.t = t, tile.count = count, tile.end = of_.cached + t + count;
    read_queries(tile, queries);
    tile.latest = INT_MIN;
    for (int i = 0; i < width; ++i) {
      tile.oldest[i] = i < count ? of_.oldest_of(of_.newest(t + i)) : INT_MAX;
      tile.latest = tile.oldest[i] > tile.latest ? tile.oldest[i] : tile.latest;
    }
    tile.begin = first_seen(tile);
    for (int g = 0; g < args_.group; ++g) {  // a sink's logit takes part; without one any score is higher
      const float sink = args_.sinks ? args_.sinks[of_.head * args_.group + g] * bits_of_1 : -INFINITY;
      const Floats top = splat(sink > -FLT_MAX ? sink : -FLT_MAX);
      store(tile.tops + g * width, top);
      store(tile.totals + g * width, sink > -FLT_MAX ? splat(1.0f) : exp2(splat(sink) - top));
    }
    if (attends_) std::memset(tile.out, 0, sizeof(float) * static_cast<std::size_t>(round_.value_stride() * lanes_));
  }

  // Puts queries into lanes; and in order, if the policy observes them.
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

  // Returns the first slot that any query sees, after padding and within the window; INT_MAX if all are padding. A
  // row's rounds begin with its text, so without a window its results do not depend on padding.
  int first_seen(const LaneTile& tile) const {
    int oldest = INT_MAX, from = 0;
    for (int i = 0; i < tile.count; ++i) oldest = tile.oldest[i] < oldest ? tile.oldest[i] : oldest;
    if (oldest == INT_MAX) return INT_MAX;
    while (of_.position[from] < oldest) ++from;  // every query sees itself
    return from;
  }

  // Attends to a round's slots. all_seen: every query sees all of them.
  void meet(LaneTile& tile, int from, bool all_seen) {
    const bool kept = observed_ && steps_.needs_attn;
    const int at = from - begin_, slots = round_.scored();
    float* const weights = weights_ + (kept ? at : 0) * lanes_;
    round_.dot(tile.queries, scores_);
    add_pending();
    Ints seen[longest_round];
    for (int s = 0; s < slots && !all_seen; ++s) seen[s] = from + s < tile.end ? who_sees(tile, from + s) : Ints{};
    for (int g = 0; g < args_.group; ++g) {
      float* const logits = observed_ && steps_.needs_logit ? logits_ + int64_t{at} * width : nullptr;
      const Floats highest = mask(all_seen ? nullptr : seen, slots, logits, g);
      if (weighs_) exponentiate(tile, highest, weights, slots, g);
    }
    if (kept) std::memcpy(round_tops_ + at / size_ * lanes_, tile.tops, sizeof(float) * static_cast<std::size_t>(lanes_));
    if (!attends_) return;
    if (by_ == Products::floats) return round_.add(weights, tile.out);
    pending_ = {round_.values(), &tile};
  }

  // Adds the last values, unless added at once. A matrix unit would wait for weights that were just computed.
  void add_pending() {
    if (pending_.tile) round_.add(pending_.values, two_weights_, pending_.tile->out);
    pending_.tile = nullptr;
  }

  // The same for all slots of a round.
  int lowest_position(int from) const {
    int lowest = INT_MAX;
    for (int i = 0; i < size_; ++i) lowest = of_.position[from + i] < lowest ? of_.position[from + i] : lowest;
    return lowest;
  }

  // Returns a mask of the lanes whose queries see the slot.
  Ints who_sees(const LaneTile& tile, int slot) const {
    return (load_as<Ints>(tile.oldest) <= of_.position[slot]) & (own_lanes() + (of_.cached + tile.t) >= slot);
  }

  static Ints own_lanes() {
    Ints lanes;
    for (int i = 0; i < width; ++i) lanes[i] = i;
    return lanes;
  }

  // Sets products of query head g to -inf where invisible, and converts them to logits if not proportional. Returns the
  // highest score in bits. seen: null if all are visible.
  [[gnu::noinline]] Floats mask(const Ints* seen, int slots, float* logits, int g) const {
    Floats highest = splat(-INFINITY);
    float* const scores = scores_ + g * width;
    if (!seen && grows() && !logits) {
      for (int s = 0; s < slots; ++s) highest = max(load(scores + s * lanes_), highest);
      return highest * bits();
    }
    for (int s = 0; s < slots; ++s) {
      Floats score = load(scores + s * lanes_) * args_.scale;
      if (args_.softcap > 0) score = args_.softcap * tanh(score / args_.softcap);
      if (logits) store(logits + s * width, join(load(logits + s * width), score, g));
      if (grows()) score = load(scores + s * lanes_);
      if (seen) score = seen[s] != 0 ? score : splat(-INFINITY);
      store(scores + s * lanes_, score);
      highest = max(score, highest);
    }
    return highest * bits();
  }

  // Whether a logit is a multiple of its product.
  bool grows() const { return args_.softcap <= 0 && args_.scale > 0; }

  // The factor from the results of `mask` to scores in bits.
  float bits() const { return bits_of_1 * (grows() ? args_.scale : 1.0f); }

  // Rounds query head g's scores to bits in lanes where the highest is far from 0. Returns the factor to bits.
  [[gnu::noinline]] Floats round_far(Floats top, int slots, int g) {
    const Floats scale = splat(bits()), size = top < 0.0f ? -top : top;
    const Ints is_far = (size > far) & (size < FLT_MAX);  // a lane without visible slots has FLT_MAX
    if (!any(is_far)) return scale;
    float* const scores = scores_ + g * width;
    for (int s = 0; s < slots; ++s) {
      const Floats score = load(scores + s * lanes_);
      store(scores + s * lanes_, is_far != 0 ? score * scale : score);
    }
    return is_far != 0 ? splat(1.0f) : scale;
  }

  // Computes exponentials of query head g's scores relative to the highest so far, and rescales sums if that rises.
  [[gnu::noinline]] void exponentiate(LaneTile& tile, Floats highest, float* weights, int slots, int g) {
    const Floats before = load(tile.tops + g * width), top = highest > before + slack ? highest : before;
    Floats total = load(tile.totals + g * width);
    if (any(top != before)) {
      const Floats down = exp2(before - top);
      total *= down;
      for (int64_t v = 0; attends_ && v < round_.value_stride(); ++v) {
        float* const at = tile.out + v * lanes_ + g * width;
        store(at, load(at) * down);
      }
    }
    const Floats scale = round_far(top, slots, g);
    const int64_t lanes = lanes_, count = slots * lanes;
    const float* const scores = scores_ + g * width;
    float* const to = weights + g * width;
    Two* const twos = by_ == Products::floats ? nullptr : two_weights_ + g * width;
    for (int64_t at = 0; at < count; at += 2 * lanes) {
      const Floats one = exp2(load(scores + at) * scale - top), other = exp2(load(scores + at + lanes) * scale - top);
      store(to + at, one);
      store(to + at + lanes, other);
      if (twos) store(twos + at / 2, two(one, other));
      total += one;
      total += other;
    }
    store(tile.tops + g * width, top);
    store(tile.totals + g * width, total);
  }

  // Combines query head g's output with those before.
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
        const float factor = of_.newest(tile.t + i) < 0 ? 0.0f : tile.totals[g * width + i];  // padding outputs 0
        steps_.dtype->from_floats(rows_ + i * stride, factor, args_.value_dim, static_cast<char*>(of_.prompt.out) + row * bytes);
      }
    }
  }

  const PromptHead& of_;
  const DecodeArgs& args_;
  const Steps& steps_;
  bool attends_;        // whether queries attend here
  bool weighs_;         // whether probabilities are observed
  Products by_;
  int64_t lanes_;       // per slot's weights
  int words_;           // of 32 bits: a query's floats, or pairs of numbers
  int64_t word_stride_;
  int size_;            // slots per round
  int64_t room_;
  Round round_;
  LaneTile tiles_[query_block / width];
  bool observed_ = false;
  int begin_ = 0;       // first slot of the first round that any query sees
  float* scores_;       // [size, group, width] products of a round, or scores (see `mask`)
  float* weights_;      // [slots, group, width] exponentials in their place, or of all slots if observed
  float* round_tops_;   // [rounds, group, width] references of each round's exponentials
  float* factors_;      // [group, width] factors from a round's exponentials to probabilities
  Two* two_weights_;    // [size / 2, group, width] the weights of two slots as pairs
  struct {
    TwoRound values;
    LaneTile* tile = nullptr;
  } pending_;           // values still to be added for this tile
  float* logits_;       // [slots, width]
  float* query_;        // [key_dim] if it is not floats already
  Two* queries_;        // [width, word_stride] in order
  float* rows_;         // [width, value_stride] outputs of a tile and query head
};

}  // namespace kvdsl
