// The keys and values of some slots in the form in which they are multiplied by what queries have in lanes: numbers one by one; in
// bfloat16 two by two, or many by a matrix unit, where there are such instructions. They are brought into it once for many queries.
#pragma once

#include <cstdint>
#include <cstring>

#include "amx.hpp"
#include "arena.hpp"
#include "lanes.hpp"
#include "prompt_head.hpp"

namespace kvdsl {

// How products are found.
enum class Products { floats, pairs, matrix };

inline Products products_by(const DecodeArgs& args, const Steps& steps) {
  if (steps.dtype != &bfloat16) return Products::floats;
  if (args.key_dim % amx::at_once == 0 && amx::lent()) return Products::matrix;
  return two_by_two && args.key_dim % 2 == 0 ? Products::pairs : Products::floats;
}

// Slots whose scores are found together keep the registers full of sums.
constexpr int slot_tile = 24;

// Slots of a round: with their weights, keys and values stay in the first-level cache while all queries of a block meet them.
constexpr int slots_of_round(Products by) { return by == Products::matrix ? amx::rows_at_once : 2 * slot_tile; }
constexpr int longest_round = amx::rows_at_once;

class Round {
 public:
  // attends: whether anybody asks for the values.
  Round(const PromptHead& head, Products by, bool attends, Arena& arena)
      : of_(head), args_(head.args), by_(by), attends_(attends), size_(slots_of_round(by)),
        dim_stride_(round_up(args_.key_dim, pair)), value_stride_(round_up(args_.value_dim, value_pad)) {
    keys_ = arena.take<float>(by == Products::floats ? size_ * dim_stride_ : 0);
    rows_ = arena.take<bf16>(by == Products::matrix ? size_ * int64_t{args_.key_dim} : 0);
    // A row is converted in whole pairs, which reach into the next row, or behind the last one.
    values_ = arena.take<float>(attends && by == Products::floats ? size_ * value_stride_ + pair : 0);
    two_values_ = arena.take<Two>(attends && by != Products::floats ? size_ / 2 * value_stride_ : 0);
    turned_values_ = arena.take<Two>(attends && by == Products::matrix ? size_ / 2 * value_stride_ : 0);
  }

  // Numbers of a value, with zeros behind.
  int64_t value_stride() const { return value_stride_; }

  // Slots whose scores `dot` finds, the last of them perhaps behind the round's end.
  int scored() const { return static_cast<int>(round_up(slots_, by_ == Products::matrix ? size_ : slot_tile)); }

  // Brings `slots` slots from one on into form.
  void read(int from, int slots) {
    from_ = from, slots_ = slots;
    switch (by_) {
      case Products::floats: return read_floats();
      case Products::pairs: return read_pairs();
      case Products::matrix: return read_rows();
    }
  }

  // scores[slot][g][lane] = queries times keys. queries: floats [group, key_dim, width], or bf16 [group, key_dim / 2, width, 2].
  void dot(const void* queries, float* scores) const {
    switch (by_) {
      case Products::floats: return dot_tiles(static_cast<const float*>(queries), args_.key_dim, scores);
      case Products::pairs: return dot_tiles(static_cast<const Two*>(queries), args_.key_dim / 2, scores);
      case Products::matrix: return dot_matrix(static_cast<const Two*>(queries), scores);
    }
  }

  // out[v][g][lane] += the sum of weights times values. weights: floats [slots, group, width], or those of two slots side by side,
  // bf16 [slots / 2, group, width, 2].
  void add(const void* weights, float* out) const {
    switch (by_) {
      case Products::floats: return add_tiles(static_cast<const float*>(weights), values_, slots_, out);
      case Products::pairs: return add_tiles(static_cast<const Two*>(weights), two_values_, (slots_ + 1) / 2, out);
      case Products::matrix: return add_matrix(static_cast<const Two*>(weights), out);
    }
  }

 private:
  void read_floats() {
    const auto& as_floats = of_.steps.dtype->as_floats;
    for (int s = 0; s < scored(); ++s) {
      key_[s] = as_floats(of_.key_of(from_ + (s < slots_ ? s : slots_ - 1)), args_.key_dim, keys_ + s * dim_stride_);
    }
    for (int s = 0; attends_ && s < slots_; ++s) {
      float* const to = values_ + s * value_stride_;
      const float* const row = as_floats(of_.value_of(from_ + s), args_.value_dim, to);
      if (row != to) std::memcpy(to, row, sizeof(float) * static_cast<std::size_t>(args_.value_dim));
      for (int64_t d = args_.value_dim; d < value_stride_; ++d) to[d] = 0.0f;
    }
  }

  void read_pairs() {
    for (int s = 0; s < scored(); ++s) key_[s] = of_.key_of(from_ + (s < slots_ ? s : slots_ - 1));
    if (attends_) pair_values((slots_ + 1) / 2);
  }

  // Keys are read as they lie; the last ones, behind which memory may end, in a copy.
  void read_rows() {
    const std::size_t bytes = sizeof(bf16) * static_cast<std::size_t>(args_.key_dim);
    if (slots_ == size_) {
      left_ = {of_.key_of(from_), args_.key_stride[2] * static_cast<int64_t>(sizeof(bf16))};
    } else {
      left_ = {rows_, static_cast<int64_t>(bytes)};
      for (int s = 0; s < slots_; ++s) std::memcpy(rows_ + int64_t{s} * args_.key_dim, of_.key_of(from_ + s), bytes);
      std::memset(rows_ + int64_t{slots_} * args_.key_dim, 0, bytes * static_cast<std::size_t>(size_ - slots_));
    }
    if (!attends_) return;
    pair_values(size_ / 2);
    for (int s = 0; s < size_ / 2; s += width) {
      for (int64_t d = 0; d < value_stride_; d += width) {
        turn(two_values_ + s * value_stride_ + d, value_stride_, turned_values_ + d * (size_ / 2) + s, size_ / 2);
      }
    }
  }

  // Values of two slots side by side; behind the last one there is nothing.
  void pair_values(int pairs) {
    const int dims = args_.value_dim;
    for (int s = 0; s < pairs; ++s) {
      Two* const to = two_values_ + s * value_stride_;
      const int first = 2 * s, second = first + 1;
      if (first >= slots_) {
        std::memset(to, 0, sizeof(Two) * static_cast<std::size_t>(value_stride_));
        continue;
      }
      const bf16* const one = static_cast<const bf16*>(of_.value_of(from_ + first));
      const bf16* const other = static_cast<const bf16*>(of_.value_of(from_ + (second < slots_ ? second : first)));
      const uint32_t both = second < slots_ ? 0xFFFFFFFFu : 0x0000FFFFu;
      for (int d = 0; d < dims; ++d) to[d] = {two(one[d], other[d]).bits & both};
      for (int64_t d = dims; d < value_stride_; ++d) to[d] = {};
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
          Floats sums[count][heads()];
          const int64_t stride = int64_t{dims} * width;
          dot_lanes<heads(), count>(queries + g * stride, stride, keys, dims, sums);
          for (int j = 0; j < count; ++j) {
            for (int h = 0; h < heads(); ++h) store(scores + (s + j) * lanes + (g + h) * width, sums[j][h]);
          }
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
  [[gnu::noinline]] void add_tiles(const X* weights, const X* values, int slots, float* out) const {
    for_heads(args_.group, [&](int g, auto heads) {
      constexpr int count = values_at_once<heads()>;
      for (int64_t v = 0; v < value_stride_; v += count) {
        add_lanes<heads(), count>(weights + g * width, args_.group, values + v, value_stride_, slots,
                                  out + (v * args_.group + g) * width);
      }
    });
  }

  void add_matrix(const Two* weights, float* out) const {
    constexpr int64_t bytes = sizeof(Two);
    const int64_t lanes_bytes = int64_t{args_.group} * amx::row_bytes;
    const int slots = static_cast<int>(round_up(slots_, amx::at_once));
    for (int g = 0; g < args_.group; ++g) {
      int64_t v = 0;
      const auto add = [&](auto blocks) {
        amx::Rows values[blocks()];
        for (int i = 0; i < blocks(); ++i) {
          values[i] = {turned_values_ + (v + i * amx::rows) * (size_ / 2), size_ / 2 * bytes};
        }
        amx::add_products<blocks(), false>(values, weights + g * width, lanes_bytes, slots,
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
  bool attends_;
  int size_;             // slots that there is room for
  int64_t dim_stride_, value_stride_;
  int from_ = 0, slots_ = 0;
  const void* key_[longest_round];  // where every slot's key lies; behind the last one the last one
  float* keys_;          // [size, dim_stride] copies, where they are not floats already
  amx::Rows left_;       // or the first of them,
  bf16* rows_;           // [size, key_dim] perhaps in a copy
  float* values_;        // [size, value_stride]
  Two* two_values_;      // [size / 2, value_stride] or those of two slots side by side,
  Two* turned_values_;   // [value_stride, size / 2] and with slots in order
};

}  // namespace kvdsl
