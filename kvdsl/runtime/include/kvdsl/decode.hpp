// One decode step of a policy, for every row of the batch and every KV head: place, attend, observe, settle.
//
// A unit is one KV head of one row. While there are units for every thread, each thread takes one at a time; those left
// over are shared by all threads, chunk by chunk. A chunk is a run of slots whose partial results are kept apart and
// combined in order, so that the result does not depend on the number of threads.
#pragma once

#include <omp.h>

#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>

#include "arena.hpp"
#include "args.hpp"
#include "attend.hpp"
#include "head.hpp"
#include "laps.hpp"
#include "select.hpp"
#include "simd.hpp"
#include "stream.hpp"
#include "types.hpp"

namespace kvdsl {

enum Status : int { ok = 0, no_free_slot = 1, out_of_memory = 2, not_live = 4, no_free_block = 8 };  // may be combined

// What the driver needs to know of a policy, for the same reason that there is a Dtype.
struct Steps {
  Dtype dtype;
  int columns;
  int scratch_columns;
  bool needs_attn;
  bool needs_logit;
  bool hard_cap;
  void (*reduce)(const float* rows, int64_t stride, int group, const float* factors, int from, int to, float* reduced);
  void (*place)(const Slot&);
  void (*observe)(const Query&);
  void (*settle)(Head&);
  Selecting selecting;
};

template <class T>
QueryOf<T> typed(const Query& query) {
  return {query};
}

template <class T, class Policy>
void observe(const Query& query) {
  Policy::observe(typed<T>(query));
}

template <class T, class Policy>
void rank_slots(const Query& query, float* by) {
  Policy::rank(typed<T>(query), by);
}

template <class T, class Policy>
void rank_dims(const Query& query, float* by) {
  Policy::sketch(typed<T>(query), by);
}

// Whether a policy has columns that a token has by itself.
template <class Derived>
constexpr bool places = &Derived::place != &Policy::place;

template <class T, class Policy>
constexpr Selecting selecting = {Policy::by,
                                 Policy::group == Group::max,
                                 tiles<T>,
                                 bounds<T>,
                                 reduce_group<Policy::group>,
                                 reduce_queries<Policy::group>,
                                 Policy::tokens,
                                 Policy::page,
                                 Policy::sketch_every,
                                 Policy::always,
                                 rank_slots<T, Policy>,
                                 rank_dims<T, Policy>};

template <class T, class Policy>
constexpr Steps steps = {dtype<T>,
                         Policy::columns,
                         Policy::scratch_columns,
                         Policy::needs_attn,
                         Policy::needs_logit,
                         Policy::hard_cap,
                         reduce_group<Policy::group>,
                         places<Policy> ? Policy::place : nullptr,
                         observe<T, Policy>,
                         Policy::settle,
                         selecting<T, Policy>};

// What one unit computes in. Rows of slots are padded to whole blocks, rows of dims to whole pairs (and stored in pairs,
// see simd.hpp).
struct Workspace {
  int chunk, chunks;  // slots of a chunk, and how many chunks
  int64_t slot_stride, query_stride, out_stride;
  float* query;        // [group, query_stride]
  float* plain_query;  // [group, key_dim] the same, in order
  float* plain_key;    // [key_dim] the new token's
  float* plain_value;  // [value_dim]
  float* pairs;        // [longest dim]
  float* weights;      // [group, slot_stride] scores, then their exponentials
  float* attn;         // [slot_stride]
  float* logit;        // [slot_stride]
  float* scratch;      // [scratch_columns, slot_stride]
  Rank* ranks;         // [Head::rank_rows, slot_stride]
  float* tops;         // [chunks, group] the maxima of the scores
  float* totals;       // [chunks, group] the sums of the exponentials
  float* inverses;     // [group] 1 / the sum of all exponentials
  float* ones;         // [group]
  float* sums;         // [chunks, group, out_stride] the weighted sums of the values
  char* zeros;         // stands for the row of a slot that is not visible
  float* ordered;      // [group, query_stride] the query as floats in order, with zeros behind
  float* turned_query; // [chunks, group, query_stride]
  float* turned_keys;  // [chunks, block, query_stride]
  float* half_key;     // [chunks, query_stride]
  ChoiceWork choice;

  // Few enough chunks to combine cheaply, small enough to share.
  static int chunk_of(int slots) { return static_cast<int>(round_up((int64_t{slots} + 63) / 64, 256)); }

  [[gnu::noinline]] Workspace(const DecodeArgs& args, const Steps& steps, Arena& arena)
      : chunk(chunk_of(args.slots)), chunks((args.slots + chunk - 1) / chunk),
        choice(args, steps.selecting, chunk, chunks, steps.dtype.size, arena) {
    // Whole powers of two would put every head's row into the same sets of the cache.
    slot_stride = round_up(args.slots, block) + width;
    query_stride = round_up(args.key_dim, pair);
    out_stride = round_up(args.value_dim, pair);
    const int64_t longest = query_stride > out_stride ? query_stride : out_stride;
    query = arena.take<float>(args.group * query_stride);
    plain_query = arena.take<float>(args.group * args.key_dim);
    plain_key = arena.take<float>(args.key_dim);
    plain_value = arena.take<float>(args.value_dim);
    pairs = arena.take<float>(longest);
    weights = arena.take<float>(args.group * slot_stride);
    attn = arena.take<float>(steps.needs_attn ? slot_stride : 0);
    logit = arena.take<float>(steps.needs_logit ? slot_stride : 0);
    scratch = arena.take<float>(steps.scratch_columns * slot_stride);
    ranks = arena.take<Rank>(Head::rank_rows * slot_stride);
    tops = arena.take<float>(chunks * args.group);
    totals = arena.take<float>(chunks * args.group);
    inverses = arena.take<float>(args.group);
    ones = arena.take<float>(args.group);
    sums = arena.take<float>(chunks * args.group * out_stride);
    const int turning = args.near ? chunks : 0;
    ordered = arena.take<float>((turning ? args.group : 0) * query_stride);
    turned_query = arena.take<float>(turning * args.group * query_stride);
    turned_keys = arena.take<float>(turning * block * query_stride);
    half_key = arena.take<float>((args.half_keys ? turning : 0) * query_stride);
    zeros = arena.take<char>(longest * steps.dtype.size);
    if (!zeros) return;
    std::memset(zeros, 0, static_cast<std::size_t>(longest * steps.dtype.size));
    for (int g = 0; g < args.group; ++g) ones[g] = 1.0f;
  }

  static int64_t bytes(const DecodeArgs& args, const Steps& steps) {
    Arena arena(nullptr);
    Workspace(args, steps, arena);
    return arena.used();
  }
};

// The lowest free slot, or INT_MAX; counts the held ones on the way.
[[gnu::noinline]] inline int find_free_slot(const int32_t* position, int slots, int& held) {
  int live = 0, first = INT_MAX;
#pragma omp simd reduction(+ : live) reduction(min : first)
  for (int i = 0; i < slots; ++i) {
    const int free_slot = position[i] < 0 ? i : INT_MAX;
    first = free_slot < first ? free_slot : first;
    live += position[i] >= 0;
  }
  held = live;
  return first;
}

// After slots were freed, the tokens behind each gap move up. `moved` has room for as many numbers as there are slots.
[[gnu::noinline]] inline void close_gaps(const int32_t* position, int32_t* rank, int slots, int32_t* moved) {
  int gaps = 0, last = -1;
#pragma omp simd reduction(+ : gaps) reduction(max : last)
  for (int i = 0; i < slots; ++i) {
    const int freed = (position[i] < 0) & (rank[i] >= 0);
    gaps += freed;
    last = freed && rank[i] > last ? rank[i] : last;
  }
  if (gaps == 0) return;
  if (gaps > 1) {
    for (int r = 0; r < slots; ++r) moved[r] = 0;
    for (int i = 0; i < slots; ++i) {
      if (position[i] < 0 && rank[i] >= 0) moved[rank[i]] = 1;
    }
    for (int r = 1; r < slots; ++r) moved[r] += moved[r - 1];
  }
#pragma omp simd
  for (int i = 0; i < slots; ++i) {
    const int by = gaps == 1 ? rank[i] > last : moved[rank[i] > 0 ? rank[i] : 0];
    rank[i] = position[i] < 0 ? -1 : rank[i] - by;
  }
}

inline int blocks_of_row(const DecodeArgs& args) { return (args.slots + args.block_size - 1) / args.block_size; }

inline Pool pool(const DecodeArgs& args) { return {args.table, args.batch, blocks_of_row(args), args.blocks}; }

// Blocks in which no head of a row holds a token any more go back to the pool.
inline void give_blocks_back(const DecodeArgs& args) {
  if (!args.table) return;
  const int64_t of_a_row = int64_t{args.kv_heads} * args.slots;
  for (int64_t b = 0; b < args.batch; ++b) {
    pool(args).give_back(b, args.position + b * of_a_row, args.kv_heads, args.slots, args.block_size);
  }
}

// One KV head of one row.
class Unit {
 public:
  Unit(const DecodeArgs& args, const Steps& steps, int number, char* workspace)
      : Unit(args, steps, number, Arena(workspace)) {}

  int chunks() const { return work_.chunks; }
  int row_chunks() const { return row_chunks_; }
  bool placed() const { return placed_; }
  bool renewing() const { return placed_ && steps_.selecting.selects() && choice_.renewing(); }
  bool choosing() const { return placed_ && choosing_; }
  int status() const { return status_; }

  // Puts token t into the first free slot. False if there is nothing to attend with: the token is padding, or no slot
  // is free.
  [[gnu::noinline]] bool place(int t) {
    placed_ = false;
    if (!real(t)) return false;
    if (steps_.hard_cap) make_room();
    const int slot = find_free_slot(position_, args_.slots, live_);
    if (slot == INT_MAX) {
      status_ |= no_free_slot;
      return false;
    }
    if (args_.table && !pool(args_).have(row_, slot / args_.block_size)) {
      status_ |= no_free_block;
      return false;
    }
    write(t, slot);
    oldest_ = args_.window > 0 && newest_ >= args_.window ? newest_ - args_.window + 1 : 0;
    for (int g = 0; g < args_.group; ++g) {
      steps_.dtype.read(token(args_.query, args_.query_stride, head_ * args_.group + g, t), args_.key_dim,
                        work_.plain_query + g * args_.key_dim, work_.query + g * work_.query_stride);
      if (args_.near) dtype<float>.pack(work_.plain_query + g * args_.key_dim, args_.key_dim, ordered_query(g));
    }
    attend_to_all();
    if (steps_.selecting.selects()) begin_choice(slot, t == 0 && args_.anew);
    return placed_ = true;
  }

  void renew(int chunk) { choice_.renew(chunk); }
  void look(int chunk) { choice_.look(chunk); }

  // Chooses what the query attends to, once every chunk was looked at.
  [[gnu::noinline]] void choose() {
    choice_.choose();
    rows_ = choice_.count();
    chosen_ = choice_.chosen();
    // Far fewer than there are slots: chunks of their own, not more of them.
    row_chunk_ = static_cast<int>(round_up((rows_ + work_.chunks - 1) / work_.chunks, 4 * block));
    row_chunks_ = (rows_ + row_chunk_ - 1) / row_chunk_;
  }

  // The tokens in these slots leave and the new ones take their places, one for one.
  //
  // past_caches: whether keys and values are written past the core's caches.
  void replace(const int32_t* slots, bool past_caches) {
    if (rank_) {
      for (int t = 0; t < args_.tokens; ++t) {
        if (real(t)) position_[slots[t]] = -1;
      }
      find_free_slot(position_, args_.slots, live_);
      close_gaps(position_, rank_, args_.slots, work_.ranks);
    }
    constexpr int early = 8;  // the rows lie anywhere, so that nothing else would fetch them
    for (int t = 0; t < args_.tokens; ++t) {
      if (t + early < args_.tokens && !past_caches) {
        fetch_row(keys_, slots[t + early]);
        fetch_row(values_, slots[t + early]);
      }
      if (real(t)) write(t, slots[t], past_caches);
    }
    if (past_caches) end_stream();
  }

  // First pass over a chunk: its scores and their maxima.
  [[gnu::noinline]] void score(int chunk) {
    float* const tops = work_.tops + int64_t{chunk} * args_.group;
    for (int g = 0; g < args_.group; ++g) tops[g] = -INFINITY;
    for (int from = chunk * row_chunk_; from < end_of(chunk); from += block) {
      const Rows rows = rows_of(keys_, from);
      if (rows.any) dot(chunk, from, rows);
      for (int g = 0; g < args_.group; ++g) {
        tops[g] = finish_scores(work_.weights + g * work_.slot_stride + from, rows.visible, args_.scale, args_.softcap,
                                tops[g]);
      }
    }
  }

  // Second pass, once every chunk has its scores: the exponentials (relative to the maximum of all), their sum, and the
  // values weighted by them.
  [[gnu::noinline]] void weigh(int chunk) {
    const int from = chunk * row_chunk_, to = end_of(chunk);
    if (steps_.needs_logit) {
      steps_.reduce(work_.weights, work_.slot_stride, args_.group, work_.ones, from, to, work_.logit);
    }
    for (int g = 0; g < args_.group; ++g) {
      float* const scores = work_.weights + g * work_.slot_stride + from;
      work_.totals[int64_t{chunk} * args_.group + g] = exponentiate(scores, to - from, top_of(g));
    }
    float* const sums = work_.sums + chunk * args_.group * work_.out_stride;
    for (int64_t i = 0; i < args_.group * work_.out_stride; ++i) sums[i] = 0.0f;
    for (int i = from; i < to; i += block) {
      const Rows rows = rows_of(values_, i);
      if (!rows.any) continue;
      steps_.dtype.add(work_.weights + i, work_.slot_stride, args_.group, rows.row, next_of(rows), args_.value_dim, sums,
                       work_.out_stride);
    }
  }

  // Combines the chunks into the output, then lets the policy observe and settle.
  [[gnu::noinline]] void finish(int t) {
    char* const out = static_cast<char*>(args_.out) +
                      size(((int64_t{row_} * args_.tokens + t) * args_.kv_heads + head_) * args_.group * args_.value_dim);
    if (!placed_) {
      std::memset(out, 0, static_cast<std::size_t>(size(int64_t{args_.group} * args_.value_dim)));
      return;
    }
    for (int g = 0; g < args_.group; ++g) {
      float total = args_.sinks ? exp(args_.sinks[head_ * args_.group + g] - top_of(g)) : 0.0f;
      for (int c = 0; c < row_chunks_; ++c) total += work_.totals[int64_t{c} * args_.group + g];
      const float inverse = work_.inverses[g] = 1.0f / total;
      float* const first = work_.sums + g * work_.out_stride;
      for (int c = 1; c < row_chunks_; ++c) {
        const float* const other = first + c * args_.group * work_.out_stride;
        for (int d = 0; d < work_.out_stride; ++d) first[d] += other[d];
      }
      steps_.dtype.write(first, inverse, args_.value_dim, out + size(int64_t{g} * args_.value_dim));
    }
    if (steps_.needs_attn) find_attn();
    observe();
    settle();
  }

  // For a call without a query: the newest token is the last one seen, attn [slots] what it attended to, or null.
  void settle_given(const float* attn) {
    find_free_slot(position_, args_.slots, live_);
    newest_ = next_ - 1;
    oldest_ = args_.window > 0 && newest_ >= args_.window ? newest_ - args_.window + 1 : 0;
    if (live_ == 0) return;
    if (attn && steps_.needs_attn) {
      std::memcpy(work_.attn, attn, sizeof(float) * static_cast<std::size_t>(args_.slots));
      observe();
    }
    settle();
  }

 private:
  // A block of rows to stream over.
  struct Rows {
    const void* row[block];
    int32_t visible[block];  // a mask: 0 or -1
    Next next;               // unless the rows were chosen
    bool any;
  };

  Unit(const DecodeArgs& args, const Steps& steps, int number, Arena arena)
      : args_(args), steps_(steps), work_(args, steps, arena), row_(number / args.kv_heads),
        head_(number % args.kv_heads), choice_(args, steps.selecting, steps.dtype, work_.choice, work_.ones, number) {
    const int64_t first = int64_t{number} * args.slots;
    keys_ = layout(args.keys, args.key_dim, number);
    values_ = layout(args.values, args.value_dim, number);
    if (args.half_keys) half_keys_ = in_one_piece(args.half_keys, 2 * args.rope_pairs, number);
    position_ = args.position + first;
    state_ = args.state ? args.state + first : nullptr;
    rank_ = args.rank ? args.rank + first : nullptr;
    column_stride_ = int64_t{args.batch} * args.kv_heads * args.slots;
    next_ = args.seen[row_];
  }

  int64_t size(int64_t elements) const { return elements * steps_.dtype.size; }

  Layout layout(void* base, int dim, int number) const {
    if (args_.first_rows) return {static_cast<char*>(base) + args_.first_rows[number] * size(dim), size(dim)};
    if (!args_.table) return in_one_piece(base, dim, number);
    const int64_t of_a_block = args_.block_size * size(dim);
    return {static_cast<char*>(base) + head_ * args_.blocks * of_a_block, size(dim), of_a_block, args_.block_size,
            args_.table + int64_t{row_} * blocks_of_row(args_)};
  }

  Layout in_one_piece(void* base, int dim, int number) const {
    return {static_cast<char*>(base) + int64_t{number} * args_.slots * size(dim), size(dim)};
  }

  static void fetch_row(const Layout& layout, int slot) {
    const char* const row = layout.row(slot);
    for (int64_t i = 0; i < layout.row_bytes; i += 64) __builtin_prefetch(row + i, 1);
  }

  bool real(int t) const { return !args_.real || args_.real[int64_t{row_} * args_.tokens + t]; }

  // Token t into a free slot.
  void write(int t, int slot, bool past_caches = false) {
    newest_ = next_++;
    position_[slot] = newest_;
    if (rank_) rank_[slot] = live_;
    ++live_;
    const char* const k = token(args_.key, args_.key_stride, head_, t);
    const char* const v = token(args_.value, args_.value_stride, head_, t);
    if (past_caches) {
      stream(keys_.row(slot), k, size(args_.key_dim));
      stream(values_.row(slot), v, size(args_.value_dim));
    } else {
      std::memcpy(keys_.row(slot), k, static_cast<std::size_t>(size(args_.key_dim)));
      std::memcpy(values_.row(slot), v, static_cast<std::size_t>(size(args_.value_dim)));
    }
    if (args_.half_keys) steps_.dtype.turn_quarter(k, rope(), half_keys_.row(slot));
    for (int c = 0; c < steps_.columns; ++c) state_[c * column_stride_ + slot] = 0.0f;
    if (!steps_.place) return;
    steps_.dtype.read(k, args_.key_dim, work_.plain_key, work_.pairs);
    steps_.dtype.read(v, args_.value_dim, work_.plain_value, work_.pairs);
    steps_.place(Slot{slot, newest_, work_.plain_key, work_.plain_value, args_.key_dim, args_.value_dim, state_,
                      column_stride_, params()});
  }

  const char* token(const void* base, const int64_t (&stride)[3], int head, int t) const {
    return static_cast<const char*>(base) + size(row_ * stride[0] + head * stride[1] + t * stride[2]);
  }

  const double* params() const { return args_.params ? args_.params + int64_t{row_} * args_.params_per_row : nullptr; }

  void attend_to_all() {
    choosing_ = false;
    chosen_ = nullptr;
    rows_ = args_.slots;
    row_chunk_ = work_.chunk;
    row_chunks_ = work_.chunks;
  }

  void begin_choice(int slot, bool anew) {
    const Query query = query_of();
    choice_.begin(query, work_.query, slot, anew);
    choosing_ = choice_.choosing();
    if (!choosing_) return;
    Slots held = query;
    held.oldest = 0;
    Head head(held, position_, work_.ranks, false);
    choice_.always(head);
  }

  // Chosen rows are fetched when they are found.
  const Next* next_of(const Rows& rows) const { return chosen_ ? nullptr : &rows.next; }

  // What every slot is given, reduced over the group; what was not chosen gets nothing.
  void find_attn() const {
    if (!chosen_) {
      steps_.reduce(work_.weights, work_.slot_stride, args_.group, work_.inverses, 0, args_.slots, work_.attn);
      return;
    }
    float* const given = choice_.spare();
    steps_.reduce(work_.weights, work_.slot_stride, args_.group, work_.inverses, 0, rows_, given);
    std::memset(work_.attn, 0, sizeof(float) * static_cast<std::size_t>(args_.slots));
    for (int i = 0; i < rows_; ++i) work_.attn[chosen_[i]] = given[i];
  }

  // The scores of a block of rows.
  void dot(int chunk, int from, const Rows& rows) const {
    float* const scores = work_.weights + from;
    const int64_t stride = work_.query_stride, to = work_.slot_stride;
    const auto as_they_are = [&] {
      steps_.dtype.dot(work_.query, stride, args_.group, rows.row, next_of(rows), args_.key_dim, scores, to);
    };
    if (!args_.near) return as_they_are();
    const Turns turns = turns_of(from, rows);
    if (turns.most == 0) return as_they_are();
    if (!turns.differ) {
      const float* const query = query_turned_back(chunk, turns.most);
      steps_.dtype.dot(query, stride, args_.group, rows.row, next_of(rows), args_.key_dim, scores, to);
    } else {
      float* const keys = work_.turned_keys + int64_t{chunk} * block * stride;
      const void* row[block];
      for (int i = 0; i < block; ++i) row[i] = keys + i * stride;
      Rows halves;
      if (args_.half_keys) halves = rows_of(half_keys_, from);
      steps_.dtype.turn(rows.row, args_.half_keys ? halves.row : nullptr, block, args_.key_dim, turns.by, rope(),
                        work_.half_key + chunk * stride, keys, stride);
      dtype<float>.dot(work_.ordered, stride, args_.group, row, nullptr, args_.key_dim, scores, to);
    }
  }

  // By how many positions the visible keys of a block must come nearer: those that were evicted between them and the
  // query. They are the same for tokens that are still together; most often none.
  struct Turns {
    int32_t by[block];
    int32_t most;
    bool differ;
  };

  Turns turns_of(int from, const Rows& rows) const {
    Turns turns;
    const int n = rows_ - from < block ? rows_ - from : block;
    const int between = newest_ - (live_ - 1);  // evicted before the query's token
    int32_t found[2][block];
    for (int i = 0; chosen_ && i < n; ++i) found[0][i] = position_[chosen_[from + i]], found[1][i] = rank_[chosen_[from + i]];
    const int32_t* const position = chosen_ ? found[0] : position_ + from;
    const int32_t* const rank = chosen_ ? found[1] : rank_ + from;
    const int32_t* const visible = rows.visible;
    int32_t* const by = turns.by;
    int32_t most = 0, least = INT_MAX;
    for (int i = n; i < block; ++i) by[i] = 0;
#pragma omp simd reduction(max : most) reduction(min : least)
    for (int i = 0; i < n; ++i) {
      const int32_t turn = between - (position[i] - rank[i]);
      by[i] = turn & visible[i];  // a mask
      most = by[i] > most ? by[i] : most;
      const int32_t low = visible[i] ? turn : INT_MAX;
      least = low < least ? low : least;
    }
    turns.most = most;
    turns.differ = least != most;
    return turns;
  }

  const float* query_turned_back(int chunk, int by) const {
    float* const turned = work_.turned_query + int64_t{chunk} * args_.group * work_.query_stride;
    float* const plain = work_.turned_keys + int64_t{chunk} * block * work_.query_stride;
    for (int g = 0; g < args_.group; ++g) {
      std::memcpy(plain, ordered_query(g), sizeof(float) * static_cast<std::size_t>(args_.key_dim));
      turn(plain, by, -1.0f, rope());
      steps_.dtype.pack(plain, args_.key_dim, turned + g * work_.query_stride);
    }
    return turned;
  }

  Rope rope() const {
    return {args_.near, args_.far, args_.rope_pairs, args_.rope_offset, args_.rope_interleaved != 0};
  }

  float* ordered_query(int g) const { return work_.ordered + g * work_.query_stride; }

  // Behind the last row the arrays go on to a whole block.
  int end_of(int chunk) const {
    const int end = (chunk + 1) * row_chunk_;
    return end < rows_ ? end : static_cast<int>(round_up(rows_, block));
  }

  Rows rows_of(const Layout& layout, int from) const {
    Rows rows;
    if (chosen_) return chosen_rows_of(layout, from);
    if (layout.table) return rows_in_blocks_of(layout, from);
    const char* const first = layout.row(from);
    const int n = args_.slots - from < block ? args_.slots - from : block;
    int any = 0;
    for (int i = 0; i < block; ++i) {
      const bool seen = i < n && position_[from + i] >= oldest_;
      rows.row[i] = seen ? first + i * layout.row_bytes : work_.zeros;
      rows.visible[i] = -static_cast<int32_t>(seen);
      any |= seen;
    }
    find_next(layout, from, args_.slots, rows.next);
    rows.any = any != 0;
    return rows;
  }

  // The same of the rows that were chosen; the next block's are fetched.
  Rows chosen_rows_of(const Layout& layout, int from) const {
    Rows rows;
    for (int i = 0; i < block; ++i) {
      const bool any = from + i < rows_;
      rows.row[i] = any ? layout.row(chosen_[from + i]) : work_.zeros;
      rows.visible[i] = -static_cast<int32_t>(any);
    }
    for (int i = from + block; i < from + 2 * block && i < rows_; ++i) {
      const char* const next = layout.row(chosen_[i]);
      for (int64_t byte = 0; byte < layout.row_bytes; byte += 64) __builtin_prefetch(next + byte);
    }
    rows.any = true;
    return rows;
  }

  // The same through the row's table.
  Rows rows_in_blocks_of(const Layout& layout, int from) const {
    Rows rows;
    const int end = args_.slots - from < block ? args_.slots : from + block;
    int any = 0;
    layout.runs(from, end, [&](int slot, int to, const char* row) {
      for (; slot < to; ++slot, row += layout.row_bytes) {
        const bool seen = position_[slot] >= oldest_;
        rows.row[slot - from] = seen ? row : work_.zeros;
        rows.visible[slot - from] = -static_cast<int32_t>(seen);
        any |= seen;
      }
    });
    for (int i = end - from; i < block; ++i) rows.row[i] = work_.zeros, rows.visible[i] = 0;
    find_next(layout, from, args_.slots, rows.next);
    rows.any = any != 0;
    return rows;
  }

  // The maximum over all slots and the sink.
  float top_of(int g) const {
    float top = args_.sinks ? args_.sinks[head_ * args_.group + g] : -INFINITY;
    for (int c = 0; c < row_chunks_; ++c) {
      const float other = work_.tops[int64_t{c} * args_.group + g];
      top = other > top ? other : top;
    }
    return top;
  }

  void fill(Slots& slots, int oldest) const {
    slots.slots = args_.slots;
    slots.position = position_;
    slots.newest = newest_;
    slots.oldest = oldest;
    slots.window = args_.window;
    slots.live = live_;
    slots.state = state_;
    slots.ring_rows = args_.ring_rows;
    slots.column_stride = column_stride_;
    slots.work = work_.scratch;
    slots.work_stride = work_.slot_stride;
    slots.params = params();
    slots.random_key = absorb(absorb(args_.seed, args_.layer), args_.head_offset + head_);
  }

  Query query_of() const {
    Query query{};
    fill(query, oldest_);
    query.attn = work_.attn;
    query.logit = work_.logit;
    query.query = work_.plain_query;
    query.group = args_.group;
    query.key_dim = args_.key_dim;
    query.value_dim = args_.value_dim;
    query.keys = keys_;
    query.values = values_;
    return query;
  }

  void observe() const { steps_.observe(query_of()); }

  // Under a hard cap, what one more token would exceed leaves before it is placed.
  void make_room() {
    find_free_slot(position_, args_.slots, live_);
    newest_ = next_ - 1;
    if (live_ > 0) settle(true);
  }

  void settle(bool before_placing = false) {
    Slots slots;
    fill(slots, 0);
    Head head(slots, position_, work_.ranks, before_placing);
    steps_.settle(head);
    if (rank_) close_gaps(position_, rank_, args_.slots, work_.ranks);
  }

  const DecodeArgs& args_;
  const Steps& steps_;
  Workspace work_;
  int row_, head_;
  Choice choice_;
  Layout keys_, values_, half_keys_{};
  int32_t* position_;
  float* state_;
  int32_t* rank_;
  int64_t column_stride_;
  int next_;  // the position of the row's next token
  int newest_ = -1, oldest_ = 0, live_ = 0;
  bool placed_ = false, choosing_ = false;
  const int32_t* chosen_ = nullptr;  // the slots that are attended to, in order; null: all
  int rows_ = 0, row_chunk_ = 0, row_chunks_ = 0;
  int status_ = ok;
};

inline Buffer& thread_buffer() {
  static thread_local Buffer buffer;
  return buffer;
}

// A unit on one thread.
inline int decode_alone(const DecodeArgs& args, const Steps& steps, int number, int64_t workspace) {
  char* const memory = thread_buffer().reserve(workspace);
  if (!memory) return out_of_memory;
  Unit unit(args, steps, number, memory);
  Laps laps(args);
  for (int t = 0; t < args.tokens; ++t) {
    if (unit.place(t)) {
      laps.end(Stage::place);
      if (unit.renewing()) {
        for (int c = 0; c < unit.chunks(); ++c) unit.renew(c);
        laps.end(Stage::renew);
      }
      if (unit.choosing()) {
        for (int c = 0; c < unit.chunks(); ++c) unit.look(c);
        laps.end(Stage::look);
        unit.choose();
        laps.end(Stage::choose);
      }
      for (int c = 0; c < unit.row_chunks(); ++c) unit.score(c);
      for (int c = 0; c < unit.row_chunks(); ++c) unit.weigh(c);
      laps.end(Stage::attend);
    }
    unit.finish(t);
    laps.end(Stage::finish);
  }
  return unit.status();
}

// Calls body(unit, chunk) for every chunk of a few units, shared by the threads of the team.
template <class Body>
inline void share(Unit* units, int count, int chunks, Body&& body) {
#pragma omp for schedule(static)
  for (int i = 0; i < count * chunks; ++i) body(units[i / chunks], i % chunks);
}

// A few units on all threads of the team; each of them calls this.
inline void decode_together(const DecodeArgs& args, const Steps& steps, Unit* units, int count) {
  const int chunks = units[0].chunks();
  Laps laps(args);
  for (int t = 0; t < args.tokens; ++t) {
    share(units, count, 1, [=](Unit& unit, int) { unit.place(t); });
    laps.end(Stage::place);
    if (steps.selecting.selects()) {
      share(units, count, chunks, [](Unit& unit, int c) { if (unit.renewing()) unit.renew(c); });
      laps.end(Stage::renew);
      share(units, count, chunks, [](Unit& unit, int c) { if (unit.choosing()) unit.look(c); });
      laps.end(Stage::look);
      share(units, count, 1, [](Unit& unit, int) { if (unit.choosing()) unit.choose(); });
      laps.end(Stage::choose);
    }
    share(units, count, chunks, [](Unit& unit, int c) { if (unit.placed() && c < unit.row_chunks()) unit.score(c); });
    share(units, count, chunks, [](Unit& unit, int c) { if (unit.placed() && c < unit.row_chunks()) unit.weigh(c); });
    laps.end(Stage::attend);
    share(units, count, 1, [=](Unit& unit, int) { unit.finish(t); });
    laps.end(Stage::finish);
  }
}

// Each row has seen its real tokens.
inline void advance(const DecodeArgs& args) {
  for (int64_t b = 0; b < args.batch; ++b) {
    int tokens = args.tokens;
    if (args.real) {
      tokens = 0;
      for (int t = 0; t < args.tokens; ++t) tokens += args.real[b * args.tokens + t] != 0;
    }
    args.seen[b] += tokens;
  }
}

inline int decode(const DecodeArgs& args, const Steps& steps) {
  const int units = args.batch * args.kv_heads;
  const int threads = args.threads > 1 ? args.threads : 1;
  const int alone = units / threads * threads, together = units - alone;
  const int64_t workspace = Workspace::bytes(args, steps);
  int status = ok;

  Unit* shared = nullptr;
  if (together > 0) {
    static thread_local Buffer buffer;
    Arena arena(buffer.reserve(together * (workspace + round_up(sizeof(Unit), 64))));
    shared = arena.take<Unit>(together);
    if (!shared) return out_of_memory;
    for (int u = 0; u < together; ++u) new (shared + u) Unit(args, steps, alone + u, arena.take<char>(workspace));
  }
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : status)
  {
#pragma omp for schedule(dynamic, 1) nowait
    for (int u = 0; u < alone; ++u) status |= decode_alone(args, steps, u, workspace);
    if (together > 0) decode_together(args, steps, shared, together);
  }
  for (int u = 0; u < together; ++u) status |= shared[u].status();
  give_blocks_back(args);
  advance(args);
  return status;
}

// Whether these are different slots that hold a token. Those that were seen are marked meanwhile.
inline bool all_live(int32_t* position, int slots, const int32_t* given, int count) {
  int n = 0;
  while (n < count && given[n] >= 0 && given[n] < slots && position[given[n]] >= 0) {
    position[given[n]] = ~position[given[n]];
    ++n;
  }
  for (int i = 0; i < n; ++i) position[given[i]] = ~position[given[i]];
  return n == count;
}

// Bytes of a layer's keys and values from which on no core's own cache holds what was written until somebody attends.
constexpr int64_t cached_bytes = int64_t{8} << 20;

// What every row and KV head has in the given slots [batch, kv_heads, tokens] leaves for the new tokens. Nobody attends.
// Changes nothing if one of the slots is free, or given twice.
inline int replace(const DecodeArgs& args, const int32_t* slots, const Steps& steps) {
  const int units = args.batch * args.kv_heads;
  const int64_t workspace = Workspace::bytes(args, steps);
  const int threads = args.threads > 1 ? args.threads : 1;
  const bool past_caches = steps.dtype.size * (args.key_dim + args.value_dim) * int64_t{args.slots} * units > cached_bytes;
  int status = ok;
#pragma omp parallel for num_threads(threads) reduction(| : status)
  for (int64_t u = 0; u < units; ++u) {
    if (!all_live(args.position + u * args.slots, args.slots, slots + u * args.tokens, args.tokens)) status |= not_live;
  }
  if (status) return status;
#pragma omp parallel for num_threads(threads) reduction(| : status)
  for (int u = 0; u < units; ++u) {
    char* const memory = thread_buffer().reserve(workspace);
    if (memory) Unit(args, steps, u, memory).replace(slots + int64_t{u} * args.tokens, past_caches);
    else status |= out_of_memory;
  }
  advance(args);
  return status;
}

inline int settle(const DecodeArgs& args, const float* attn, const Steps& steps) {
  const int units = args.batch * args.kv_heads;
  const int64_t workspace = Workspace::bytes(args, steps);
  int status = ok;
#pragma omp parallel for num_threads(args.threads > 1 ? args.threads : 1) reduction(| : status)
  for (int u = 0; u < units; ++u) {
    char* const memory = thread_buffer().reserve(workspace);
    if (memory) Unit(args, steps, u, memory).settle_given(attn ? attn + int64_t{u} * args.slots : nullptr);
    else status |= out_of_memory;
  }
  give_blocks_back(args);
  return status;
}

// T tokens for every row and KV head, one by one. Returns a Status; anything but ok leaves the cache in no defined state.
template <class T, class Policy>
int decode(const DecodeArgs& args) {
  return decode(args, steps<T, Policy>);
}

// Replaces tokens of the dtype's size.
template <class T, class Policy>
int replace(const DecodeArgs& args, const int32_t* slots) {
  return replace(args, slots, steps<T, Policy>);
}

// Observe and settle without a query: attn [batch, kv_heads, slots] is given; or null, to settle only, as after a prompt
// whose columns were computed elsewhere.
template <class Policy>
int settle(const DecodeArgs& args, const float* attn) {
  return settle(args, attn, steps<float, Policy>);
}

}  // namespace kvdsl
