// Attention from query heads to a prompt that lies in blocks, for one KV head. Queries of several tokens are read
// together: blocks that they share are read once for all of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <kvdsl/dtype.hpp>

#include "amx.hpp"
#include "attend.hpp"
#include "lanes.hpp"

namespace kvdsl {

// One KV head of a prompt's keys and values.
struct PromptBlocks {
  const char* base;      // the head's keys in the first of all blocks
  const int32_t* table;  // the prompt's blocks in order
  int64_t block_bytes, values_at, row_bytes;
  int block_size;
};

// Tokens between updates of the softmax. Queries that share blocks share whole chunks.
constexpr int chunk = 4 * block;

// Where the keys and values of a chunk lie. Zeros stand behind its last token.
struct Chunk {
  const void *keys[chunk], *values[chunk];
  int32_t visible[chunk];
  int slots;

  void find(const PromptBlocks& prompt, int at, int tokens, const void* zeros) {
    slots = (tokens + block - 1) / block * block;
    for (int s = 0; s < tokens;) {
      const int number = (at + s) / prompt.block_size, from = (at + s) % prompt.block_size;
      const char* key = prompt.base + prompt.table[number] * prompt.block_bytes + from * prompt.row_bytes;
      const int end = tokens - s < prompt.block_size - from ? tokens : s + prompt.block_size - from;
      for (; s < end; ++s, key += prompt.row_bytes) keys[s] = key, values[s] = key + prompt.values_at, visible[s] = -1;
    }
    for (int s = tokens; s < slots; ++s) keys[s] = values[s] = zeros, visible[s] = 0;
  }
};

class PromptReader {
 public:
  // Starts `count` queries, [dim] each, with a sink's logit or -inf each.
  void start(const DecodeArgs& args, const Dtype& type, int block_size, const char* const* queries, const float* sinks, int count) {
    args_ = &args, type_ = &type, dim_ = args.key_dim, stride_ = (dim_ + pair - 1) / pair * pair;
    has_matrix_ = &type == &bfloat16 && dim_ % amx::at_once == 0 && block_size % amx::rows == 0 && amx::lent();
    raw_.assign(queries, queries + count);
    tops_.assign(sinks, sinks + count);
    totals_.resize(count);
    for (int q = 0; q < count; ++q) totals_[q] = sinks[q] > -INFINITY ? 1.0f : 0.0f;
    out_.assign(count * stride_, 0.0f);
    scores_.resize((count + width) * int64_t{chunk});  // a tile has sixteen rows
    zeros_.assign(dim_ * sizeof(float), 0);
    queries_.resize(count * stride_), plain_.resize(dim_);
    for (int q = 0; q < count; ++q) type.read(queries[q], dim_, plain_.data(), queries_.data() + q * stride_);
  }

  // Attends from queries first to first + count to the tokens from `from`, a multiple of `chunk`, to before `to`.
  void read(const PromptBlocks& prompt, int from, int to, int first, int count) {
    const bool by_matrix = has_matrix_ && count >= few;
    const auto find = [&](int at, Chunk& found) { found.find(prompt, at, to - at < chunk ? to - at : chunk, zeros_.data()); };
    if (from >= to) return;
    const amx::Configured tiles(by_matrix);
    if (by_matrix) put_in_lanes(first, count);
    find(from, chunks_[0]);
    for (int at = from, turn = 0; at < to; at += chunk, turn ^= 1) {
      const Chunk &now = chunks_[turn], &next = chunks_[turn ^ (at + chunk < to)];  // the last one has no next
      if (&next != &now) find(at + chunk, chunks_[turn ^ 1]);
      by_matrix ? multiply_keys(now, first, count) : dot(now, next, first, count);
      for (int q = first; q < first + count; ++q) weigh(now, q);
      by_matrix ? multiply_values(now, first, count) : add(now, next, first, count);
    }
  }

  // Writes a query's output, in pairs, and returns its log-sum-exp.
  float finish(int q, float* out) const {
    for (int64_t d = 0; d < stride_; ++d) out[d] = out_[q * stride_ + d] / totals_[q];
    return tops_[q] + std::log(totals_[q]);
  }

 private:
  static constexpr int few = 6;  // for fewer queries a matrix unit is no faster than vectors

  float* scores(int q) { return scores_.data() + q * int64_t{chunk}; }
  float* out(int q) { return out_.data() + q * stride_; }

  // Turns a query's products into weights, and rescales what it has so far.
  void weigh(const Chunk& now, int q) {
    const float before = tops_[q];
    float top = before;
    for (int s = 0; s < now.slots; s += block) {
      top = finish_scores(scores(q) + s, now.visible + s, args_->scale, args_->softcap, 0.0f, nullptr, top);
    }
    const float total = exponentiate(scores(q), now.slots, top);
    if (top != before) {
      const float factor = exp(before - top);
      totals_[q] *= factor;
      for (int64_t d = 0; d < stride_; d += width) store(out(q) + d, load(out(q) + d) * factor);
    }
    tops_[q] = top, totals_[q] += total;
  }

  // -- by vectors --------------------------------------------------------------------------------------------------

  void dot(const Chunk& now, const Chunk& next, int first, int count) {
    for (int s = 0; s < now.slots; s += block) {
      const Next ahead = rows_of(next.keys + s);
      type_->dot(queries_.data() + first * stride_, stride_, count, now.keys + s, &ahead, dim_, scores(first) + s, chunk);
    }
  }

  void add(const Chunk& now, const Chunk& next, int first, int count) {
    for (int s = 0; s < now.slots; s += block) {
      const Next ahead = rows_of(next.values + s);
      type_->add(scores(first) + s, chunk, count, now.values + s, &ahead, dim_, out(first), stride_);
    }
  }

  static Next rows_of(const void* const* rows) {
    Next next;
    for (int i = 0; i < block / rows_at_once; ++i) next.row[i] = rows[i * rows_at_once];
    return next;
  }

  // -- by a matrix unit, sixteen queries at a time -----------------------------------------------------------------

  // Puts queries into lanes, as pairs of dims: [tiles, dim / 2, 16].
  void put_in_lanes(int first, int count) {
    const int words = dim_ / 2;
    lanes_.assign((count + amx::rows) * int64_t{words}, {});
    rows_.assign(amx::rows * words, {});
    products_.resize(chunk * amx::rows);
    for (int tile = 0; tile < count; tile += amx::rows) {
      for (int q = tile; q < count && q < tile + amx::rows; ++q) {
        std::memcpy(rows_.data() + (q - tile) * words, raw_[first + q], words * sizeof(Two));
      }
      for (int w = 0; w < words; w += width) turn(rows_.data() + w, words, lanes_.data() + (tile * words + w * width), width);
    }
  }

  void multiply_keys(const Chunk& now, int first, int count) {
    const int64_t row_bytes = dim_ * static_cast<int64_t>(sizeof(bf16));
    for (int tile = 0; tile < count; tile += amx::rows) {
      for (int s = 0; s < now.slots; s += amx::rows_at_once) {
        amx::Rows keys[amx::blocks];
        for (int i = 0; i < amx::blocks; ++i) {  // what lies behind the last token is not visible
          const int at = s + i * amx::rows;
          keys[i] = {now.keys[at < now.slots && now.visible[at] ? at : s], row_bytes};
        }
        amx::add_products<amx::blocks, true>(keys, lanes_.data() + tile * dim_ / 2, amx::row_bytes, dim_,
                                             products_.data() + s * amx::rows, amx::row_bytes);
      }
      for (int s = 0; s < now.slots; s += amx::rows) turn(products_.data() + s * amx::rows, amx::rows, scores(first + tile) + s, chunk);
    }
  }

  void multiply_values(const Chunk& now, int first, int count) {
    const int64_t half = int64_t{chunk} / 2 * amx::rows;
    values_.resize(dim_ / amx::rows * half), weights_.resize(amx::rows * chunk / 2), added_.resize(amx::rows * dim_);
    for (int d = 0; d < dim_; d += amx::at_once) {
      Two* const to = values_.data() + d / amx::rows * half;
      for (int s = 0; s < now.slots; s += 2) {
        amx::interleave(now.values[s], now.values[s + 1], d, to + s / 2 * amx::rows, to + half + s / 2 * amx::rows);
      }
    }
    for (int tile = 0; tile < count; tile += amx::rows) {
      const int queries = count - tile < amx::rows ? count - tile : amx::rows;
      for (int q = 0; q < queries; ++q) {
        for (int s = 0; s < now.slots; s += pair) amx::round(scores(first + tile + q) + s, weights_.data() + (q * chunk + s) / 2);
      }
      for (int d = 0; d < dim_; d += amx::at_once) {
        amx::add_columns({weights_.data(), chunk * static_cast<int64_t>(sizeof(bf16))}, values_.data() + d / amx::rows * half, half,
                         now.slots, added_.data() + d, dim_ * static_cast<int64_t>(sizeof(float)));
      }
      for (int q = 0; q < queries; ++q) {
        for (int d = 0; d < dim_; d += pair) {
          float* const to = out(first + tile + q) + d;
          const Pair sums = amx::in_pairs(added_.data() + q * dim_ + d);
          store(to, load(to) + sums.a), store(to + width, load(to + width) + sums.b);
        }
      }
    }
  }

  const DecodeArgs* args_ = nullptr;
  const Dtype* type_ = nullptr;
  int dim_ = 0;
  int64_t stride_ = 0;  // of outputs
  bool has_matrix_ = false;
  Chunk chunks_[2];
  std::vector<const char*> raw_;
  std::vector<char> zeros_;
  std::vector<float> queries_, plain_, tops_, totals_, out_;
  std::vector<float> scores_;    // [queries, chunk]
  std::vector<Two> rows_, lanes_;
  std::vector<float> products_;  // [chunk, 16]
  std::vector<Two> values_;      // [dim / 16, chunk / 2, 16], pairs of slots
  std::vector<Two> weights_;     // [16, chunk / 2]
  std::vector<float> added_;     // [16, dim]
};

}  // namespace kvdsl
