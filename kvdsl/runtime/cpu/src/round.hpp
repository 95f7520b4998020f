// Keys and values of a round of slots in the form for products with queries in lanes: numbers one by one; in bfloat16
// as pairs, or many for a matrix unit, if there are such instructions. Conversion happens once for many queries: values
// in bfloat16 once per prompt, the rest once per block of queries.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "amx.hpp"
#include "arena.hpp"
#include "lanes.hpp"
#include "prompt_head.hpp"

namespace kvdsl {

// How products are computed.
enum class Products { floats, pairs, matrix };

inline Products products_by(const DecodeArgs& args, const Steps& steps) {
  if (steps.dtype != &bfloat16) return Products::floats;
  if (args.key_dim % amx::at_once == 0 && amx::lent()) return Products::matrix;
  return two_by_two && args.key_dim % 2 == 0 ? Products::pairs : Products::floats;
}

// Slots scored together, enough to fill the registers with sums.
constexpr int slot_tile = 24;

// Slots per round: with their weights, keys and values stay in the L1 cache while all queries of a block use them.
constexpr int slots_of_round(Products by) { return by == Products::matrix ? amx::rows_at_once : 2 * slot_tile; }
constexpr int longest_round = amx::rows_at_once;

// Values of all KV heads in bfloat16: [slots / 2, value_stride] as pairs of two slots; for the matrix unit
// [value_stride, slots / 2] with slots in order. Stored by rounds; the first begins with the row's text.
class TwoValues {
 public:
  TwoValues(const DecodeArgs& args, Products by, int heads)
      : by_(by), size_(slots_of_round(by)), stride_(round_up(args.value_dim, value_pad)), slots_(args.slots), dims_(args.value_dim),
        rounds_(by == Products::floats ? 0 : (slots_ + size_ - 1) / size_),
        memory_(new (std::nothrow) Two[static_cast<std::size_t>(heads * rounds_ * of_round())]) {}

  explicit operator bool() const { return memory_ != nullptr; }
  int rounds() const { return rounds_; }

  // Returns the round that begins with this slot.
  const Two* round(const PromptHead& head, int from) const { return place(head, (from - head.begin) / size_); }

  // Converts the n-th round of a KV head.
  void read(const PromptHead& head, int n) const {
    const int first = head.begin + n * size_, pairs = size_ / 2;
    Two* const to = place(head, n);
    for (int d = 0; d < stride_; d += width) {
      for (int s = 0; by_ == Products::pairs && s < pairs; ++s) side_by_side(head, first + 2 * s, d, to + s * stride_ + d);
      for (int s = 0; by_ == Products::matrix && s < pairs; s += width) {
        Two twos[width * width];
        for (int i = 0; i < width; ++i) side_by_side(head, first + 2 * (s + i), d, twos + i * width);
        turn(twos, width, to + int64_t{d} * pairs + s, pairs);
      }
    }
  }

 private:
  int64_t of_round() const { return size_ / 2 * stride_; }
  Two* place(const PromptHead& head, int n) const { return memory_.get() + (int64_t{head.number} * rounds_ + n) * of_round(); }

  // Returns `width` numbers of a slot and the next one, from dim d on; zeros beyond the end.
  void side_by_side(const PromptHead& head, int slot, int d, Two* to) const {
    const int dims = slot >= slots_ ? 0 : dims_ - d < width ? dims_ - d : width;
    const bool both = slot + 1 < slots_;
    const bf16* const one = dims > 0 ? static_cast<const bf16*>(head.value_of(slot)) + d : nullptr;
    const bf16* const other = dims > 0 ? static_cast<const bf16*>(head.value_of(both ? slot + 1 : slot)) + d : nullptr;
    const uint32_t mask = both ? 0xFFFFFFFFu : 0x0000FFFFu;
    for (int i = 0; i < dims; ++i) to[i] = {two(one[i], other[i]).bits & mask};
    for (int i = dims > 0 ? dims : 0; i < width; ++i) to[i] = {};
  }

  Products by_;
  int size_;        // slots per round
  int64_t stride_;  // dims of a value, padded
  int slots_, dims_, rounds_;
  std::unique_ptr<Two[]> memory_;
};

// Keys and values of one round.
struct TwoRound {
  const Two* first = nullptr;
  int slots = 0;
};

class Round {
 public:
  // values: null if not needed.
  Round(const PromptHead& head, Products by, const TwoValues* values, Arena& arena)
      : of_(head), args_(head.args), by_(by), two_values_(values), size_(slots_of_round(by)),
        dim_stride_(round_up(args_.key_dim, pair)), value_stride_(round_up(args_.value_dim, value_pad)) {
    keys_ = arena.take<float>(by == Products::floats ? size_ * dim_stride_ : 0);
    rows_ = arena.take<bf16>(by == Products::matrix ? size_ * int64_t{args_.key_dim} : 0);
    // Rows are converted in whole pairs, which reach into the next row or beyond the last one.
    values_ = arena.take<float>(values && by == Products::floats ? size_ * value_stride_ + pair : 0);
  }

  // Dims of a value, padded.
  int64_t value_stride() const { return value_stride_; }

  // Slots scored by `dot`, perhaps beyond the round's end.
  int scored() const { return static_cast<int>(round_up(slots_, by_ == Products::matrix ? size_ : slot_tile)); }

  // Converts `slots` slots from one on.
  void read(int from, int slots) {
    from_ = from, slots_ = slots;
    switch (by_) {
      case Products::floats: return read_floats();
      case Products::pairs: return read_pairs();
      case Products::matrix: return read_rows();
    }
  }

  // scores[slot][g][lane] = queries times keys. queries: floats [group, key_dim, width], or bf16 [group, key_dim / 2,
  // width, 2].
  void dot(const void* queries, float* scores) const {
    switch (by_) {
      case Products::floats: return dot_tiles(static_cast<const float*>(queries), args_.key_dim, scores);
      case Products::pairs: return dot_tiles(static_cast<const Two*>(queries), args_.key_dim / 2, scores);
      case Products::matrix: return dot_matrix(static_cast<const Two*>(queries), scores);
    }
  }

  TwoRound values() const { return {two_values_->round(of_, from_), slots_}; }

  // out[v][g][lane] += sum of weights times values. weights: [slots, group, width].
  void add(const float* weights, float* out) const { add_tiles(weights, added_.first, added_.stride, slots_, out); }

  // The same in bfloat16. weights: pairs of two slots, bf16 [slots / 2, group, width, 2].
  void add(const TwoRound& values, const Two* weights, float* out) const {
    if (by_ == Products::pairs) add_tiles(weights, values.first, value_stride_, (values.slots + 1) / 2, out);
    else add_matrix(values, weights, out);
  }

 private:
  void read_floats() {
    const auto& as_floats = of_.steps.dtype->as_floats;
    for (int s = 0; s < scored(); ++s) {
      key_[s] = as_floats(of_.key_of(from_ + (s < slots_ ? s : slots_ - 1)), args_.key_dim, keys_ + s * dim_stride_);
    }
    if (!two_values_) return;
    if (of_.steps.dtype == &float32 && args_.value_dim == value_stride_) {
      added_ = {static_cast<const float*>(of_.value_of(from_)), args_.value_stride[2]};
      return;
    }
    added_ = {values_, value_stride_};
    for (int s = 0; s < slots_; ++s) {
      float* const to = values_ + s * value_stride_;
      const float* const row = as_floats(of_.value_of(from_ + s), args_.value_dim, to);
      if (row != to) std::memcpy(to, row, sizeof(float) * static_cast<std::size_t>(args_.value_dim));
      for (int64_t d = args_.value_dim; d < value_stride_; ++d) to[d] = 0.0f;
    }
  }

  void read_pairs() {
    for (int s = 0; s < scored(); ++s) key_[s] = of_.key_of(from_ + (s < slots_ ? s : slots_ - 1));
  }

  // Keys are read in place; the last ones, beyond which memory may end, from a copy.
  void read_rows() {
    const std::size_t bytes = sizeof(bf16) * static_cast<std::size_t>(args_.key_dim);
    if (from_ + size_ <= args_.slots) {
      left_ = {of_.key_of(from_), args_.key_stride[2] * static_cast<int64_t>(sizeof(bf16))};
    } else {
      left_ = {rows_, static_cast<int64_t>(bytes)};
      for (int s = 0; s < slots_; ++s) std::memcpy(rows_ + int64_t{s} * args_.key_dim, of_.key_of(from_ + s), bytes);
      std::memset(rows_ + int64_t{slots_} * args_.key_dim, 0, bytes * static_cast<std::size_t>(size_ - slots_));
    }
  }

  template <class X>
  [[gnu::noinline]] void dot_tiles(const X* queries, int dims, float* scores) const {
    const int64_t lanes = int64_t{args_.group} * width;
    for (int from = 0; from < slots_; from += slot_tile) {
      for_heads(args_.group, [&](int g, auto heads) {
        constexpr int count = slots_at_once<heads()>;
        for (int s = from; s < from + slot_tile; s += count) {
          const X* keys[count];
          for (int j = 0; j < count; ++j) keys[j] = static_cast<const X*>(key_[s + j]);
          dot_lanes<heads(), count>(queries + int64_t{g} * dims * width, args_.group, keys, dims, scores + s * lanes + g * width);
        }
      });
    }
  }

  void dot_matrix(const Two* queries, float* scores) const {
    const int64_t lanes_bytes = int64_t{args_.group} * amx::row_bytes;
    amx::Rows keys[amx::blocks];
    for (int i = 0; i < amx::blocks; ++i) {
      keys[i] = {static_cast<const char*>(left_.first) + i * amx::rows * left_.stride, left_.stride};
    }
    for (int g = 0; g < args_.group; ++g) {
      const Two* const own = queries + int64_t{g} * (args_.key_dim / 2) * width;
      amx::add_products<amx::blocks, true>(keys, own, amx::row_bytes, args_.key_dim, scores + g * width, lanes_bytes);
    }
  }

  template <class X>
  [[gnu::noinline]] void add_tiles(const X* weights, const X* values, int64_t stride, int slots, float* out) const {
    for_heads(args_.group, [&](int g, auto heads) {
      constexpr int count = values_at_once<heads()>;
      for (int64_t v = 0; v < value_stride_; v += count) {
        add_lanes<heads(), count>(weights + g * width, args_.group, values + v, stride, slots,
                                  out + (v * args_.group + g) * width);
      }
    });
  }

  void add_matrix(const TwoRound& values, const Two* weights, float* out) const {
    constexpr int64_t bytes = sizeof(Two);
    const int64_t lanes_bytes = int64_t{args_.group} * amx::row_bytes;
    const int slots = static_cast<int>(round_up(values.slots, amx::at_once));
    for (int g = 0; g < args_.group; ++g) {
      int64_t v = 0;
      const auto add = [&](auto blocks) {
        amx::Rows rows[blocks()];
        for (int i = 0; i < blocks(); ++i) rows[i] = {values.first + (v + i * amx::rows) * (size_ / 2), size_ / 2 * bytes};
        amx::add_products<blocks(), false>(rows, weights + g * width, lanes_bytes, slots,
                                           out + (v * args_.group + g) * width, lanes_bytes);
        v += blocks() * amx::rows;
      };
      while (v + amx::rows_at_once <= value_stride_) add(std::integral_constant<int, amx::blocks>{});
      while (v < value_stride_) add(std::integral_constant<int, 1>{});
    }
  }

  const PromptHead& of_;
  const DecodeArgs& args_;
  Products by_;
  const TwoValues* two_values_;
  int size_;             // capacity in slots
  int64_t dim_stride_, value_stride_;
  int from_ = 0, slots_ = 0;
  const void* key_[longest_round];  // each slot's key; beyond the last slot, the last key
  float* keys_;          // [size, dim_stride] copies, if they are not floats already
  amx::Rows left_;       // or the first of them,
  bf16* rows_;           // [size, key_dim] perhaps in a copy
  struct {
    const float* first;
    int64_t stride;
  } added_{};            // values as floats, row by row: in place, or
  float* values_;        // [size, value_stride] copies
};

}  // namespace kvdsl
