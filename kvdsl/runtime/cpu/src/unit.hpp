// A decode step of one KV head of one row: place, select, attend, observe, settle.
//
// A chunk is a run of slots. Partial results of chunks are stored separately and combined in order, so that results do
// not depend on the number of threads.
#pragma once

#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>

#include <kvdsl/args.hpp>
#include <kvdsl/head.hpp>
#include <kvdsl/layout.hpp>
#include <kvdsl/steps.hpp>
#include <kvdsl/types.hpp>

#include "arena.hpp"
#include "attend.hpp"
#include "rotate.hpp"
#include "select.hpp"
#include "simd.hpp"
#include "slots.hpp"
#include "stream.hpp"
#include "workspace.hpp"

namespace kvdsl {

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
  // Whether heads of this row may select by a vote: all do if their numbers are equal, else some may.
  bool voting() const { return placed_ && steps_.selecting.vote != Vote::none && (choosing_ || args_.params_per_head != 0); }
  int status() const { return status_; }

  // Places token t in the first free slot. Returns false if the token is padding or no slot is free.
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
      steps_.dtype->read(token(args_.query, args_.query_stride, head_ * args_.group + g, t), args_.key_dim,
                        work_.plain_query + g * args_.key_dim, work_.query + g * work_.query_stride);
      turn_by_hadamard(keys_as_, work_.query + g * work_.query_stride, args_.key_dim);
    }
    in_order_ = keys_as_ && keys_as_->turned && !queries_are_finite();
    for (int g = 0; (args_.near || keys_as_) && g < args_.group; ++g) {
      float32.pack(work_.plain_query + g * args_.key_dim, args_.key_dim, ordered_query(g));
    }
    end_ = end_of_held(position_, args_.slots);
    free_ = args_.first_rows ? 0 : args_.slots - end_;
    attend_to_all();
    if (steps_.selecting.selects()) begin_choice(slot);
    const int64_t choice = ((int64_t{t} * args_.batch + row_) * args_.kv_heads + head_) * choice_.choices() * args_.slots;
    made_ = args_.made ? args_.made + choice : nullptr;
    if (made_ && !choosing_) choice_.make_all(made_);
    if (args_.taken) {
      choice_.take(args_.taken + choice);
      attend_to_chosen();
    }
    return placed_ = true;
  }

  void renew(int chunk) { choice_.renew(chunk); }
  void look(int chunk) { choice_.look(chunk); }

  void ask() { choice_.ask(); }

  // Collects the votes of all heads of the row, which are consecutive units.
  void hear(const Unit* units) {
    const Unit* const first = units + row_ * args_.kv_heads;
    choice_.hear([=](int head) { return first[head].choice_.asked(); }, args_.kv_heads);
  }

  // Selects for this query, or for other layers, once every chunk is ranked.
  [[gnu::noinline]] void choose() {
    choice_.choose();
    if (made_) choice_.make(made_);
    else attend_to_chosen();
  }

  // Replaces the tokens in these slots by new ones, one for one.
  //
  // past_caches: keys and values are written past the core's caches.
  void replace(const int32_t* slots, bool past_caches) {
    if (rank_) {
      for (int t = 0; t < args_.tokens; ++t) {
        if (real(t)) position_[slots[t]] = -1;
      }
      find_free_slot(position_, args_.slots, live_);
      close_gaps(position_, rank_, args_.slots, work_.grades);
    }
    constexpr int early = 8;  // rows lie anywhere, so prefetch them
    for (int t = 0; t < args_.tokens; ++t) {
      if (t + early < args_.tokens && !past_caches) {
        fetch_row(keys_, slots[t + early]);
        fetch_row(values_, slots[t + early]);
      }
      if (real(t)) write(t, slots[t], past_caches);
    }
    if (past_caches) end_stream();
  }

  // First pass over a chunk: scores and their maxima.
  [[gnu::noinline]] void score(int chunk) {
    float* const tops = work_.tops + int64_t{chunk} * args_.group;
    for (int g = 0; g < args_.group; ++g) tops[g] = -INFINITY;
    for (int from = chunk * row_chunk_; from < end_of(chunk); from += block) {
      const Rows rows = rows_of(keys_, from);
      if (rows.any) dot(chunk, from, rows);
      float behind[block];
      if (args_.slopes) find_distances(from, behind);
      const int32_t* const visible = own_ ? own_ + from : rows.visible;
      const int64_t apart = own_ ? choice_.padded() : 0;
      for (int g = 0; g < args_.group; ++g) {
        const float slope = args_.slopes ? args_.slopes[head_ * args_.group + g] : 0.0f;
        tops[g] = finish_scores(work_.weights + g * work_.slot_stride + from, visible + g * apart, args_.scale, args_.softcap, slope,
                                args_.slopes ? behind : nullptr, tops[g]);
      }
    }
  }

  // Second pass, after all scores: exponentials relative to the overall maximum, their sum, and weighted values.
  [[gnu::noinline]] void weigh(int chunk) {
    const int from = chunk * row_chunk_, to = end_of(chunk);
    if (steps_.needs_logit) {
      reduction(steps_.group)(work_.weights, work_.slot_stride, args_.group, work_.ones, from, to, work_.logit);
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
      if (own_) {
        add_own(i, rows, sums);
        continue;
      }
      (values_as_ ? values_as_->add : steps_.dtype->add)(work_.weights + i, work_.slot_stride, args_.group, rows.row, next_of(rows),
                                                   args_.value_dim, sums, work_.out_stride);
    }
  }

  // Combines chunks into the output, then observes and settles.
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
      if (args_.beside) {
        const int head = head_ * args_.group + g;
        const float share = exp(args_.sinks[head] - top_of(g));
        const float* const other = args_.beside + head * work_.out_stride;
        for (int d = 0; d < work_.out_stride; ++d) first[d] += share * other[d];
      }
      turn_by_hadamard(values_as_, first, args_.value_dim);
      steps_.dtype->write(first, inverse, args_.value_dim, out + size(int64_t{g} * args_.value_dim));
    }
    if (steps_.needs_attn) find_attn();
    observe();
    settle();
  }

  // Observes and settles without a query: the newest token is the last one seen; attn [slots] or null.
  void settle_given(const float* attn) {
    if (!real(0)) return;
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
    Next next;               // unless the rows were selected
    bool any;
  };

  Unit(const DecodeArgs& args, const Steps& steps, int number, Arena arena)
      : args_(args), steps_(steps), work_(args, steps, arena), row_(number / args.kv_heads),
        head_(number % args.kv_heads), choice_(args, steps, work_.choice, work_.ones, number) {
    if (args.key_dtype) keys_as_ = &stored[args.key_dtype - 1], values_as_ = &stored[args.value_dtype - 1];
    if (args.copied) copied_ = args.copied[row_] != 0;
    const int64_t first = int64_t{number} * args.slots;
    if (args.keys) {  // unset at the end of a prompt, which only settles
      keys_ = layout(args.keys, row_bytes(keys_as_, args.key_dim), number);
      values_ = layout(args.values, row_bytes(values_as_, args.value_dim), number);
    }
    if (args.half_keys) half_keys_ = in_one_piece(args.half_keys, size(2 * args.rope_pairs), number);
    position_ = args.position + first;
    state_ = args.state ? args.state + first : nullptr;
    rank_ = args.rank ? args.rank + first : nullptr;
    column_stride_ = int64_t{args.batch} * args.kv_heads * args.slots;
    next_ = args.seen[row_];
  }

  int64_t size(int64_t elements) const { return elements * steps_.dtype->size; }

  // Size of a cached key or value.
  int64_t row_bytes(const Stored* as, int dim) const { return as ? as->bytes(dim) : size(dim); }

  Layout layout(void* base, int64_t row, int number) const {
    if (args_.first_rows) return {static_cast<char*>(base) + args_.first_rows[number] * row, row};
    if (!args_.table) return in_one_piece(base, row, number);
    if (args_.block_stride) {
      return {static_cast<char*>(base) + head_ * args_.head_stride, row, args_.block_stride, args_.block_size,
              args_.table + int64_t{row_} * blocks_of_row(args_)};
    }
    const int64_t of_a_block = args_.block_size * row;
    return {static_cast<char*>(base) + head_ * args_.blocks * of_a_block, row, of_a_block, args_.block_size,
            args_.table + int64_t{row_} * blocks_of_row(args_)};
  }

  Layout in_one_piece(void* base, int64_t row, int number) const {
    return {static_cast<char*>(base) + int64_t{number} * args_.slots * row, row};
  }

  static void fetch_row(const Layout& layout, int slot) {
    const char* const row = layout.row(slot);
    for (int64_t i = 0; i < layout.row_bytes; i += 64) __builtin_prefetch(row + i, 1);
  }

  bool real(int t) const { return !args_.real || args_.real[int64_t{row_} * args_.tokens + t]; }

  // Writes token t into a free slot.
  void write(int t, int slot, bool past_caches = false) {
    newest_ = next_++;
    position_[slot] = newest_;
    if (rank_) rank_[slot] = live_;
    ++live_;
    const char* const k = token(args_.key, args_.key_stride, head_, t);
    const char* const v = token(args_.value, args_.value_stride, head_, t);
    if (keys_as_) {
      keys_as_->pack(reinterpret_cast<const float*>(k), args_.key_dim, work_.pairs, keys_.row(slot));
      values_as_->pack(reinterpret_cast<const float*>(v), args_.value_dim, work_.pairs, values_.row(slot));
    } else if (past_caches) {
      stream(keys_.row(slot), k, size(args_.key_dim));
      stream(values_.row(slot), v, size(args_.value_dim));
    } else {
      std::memcpy(keys_.row(slot), k, static_cast<std::size_t>(size(args_.key_dim)));
      std::memcpy(values_.row(slot), v, static_cast<std::size_t>(size(args_.value_dim)));
    }
    if (args_.half_keys) steps_.dtype->turn_quarter(k, rope(), half_keys_.row(slot));
    for (int c = 0; c < steps_.columns; ++c) state_[c * column_stride_ + slot] = 0.0f;
    if (!steps_.place) return;
    read_new(keys_as_, k, keys_.row(slot), args_.key_dim, work_.plain_key);
    read_new(values_as_, v, values_.row(slot), args_.value_dim, work_.plain_value);
    steps_.place(Slot{slot, newest_, work_.plain_key, work_.plain_value, args_.key_dim, args_.value_dim, state_,
                      column_stride_, params(), constants_of(args_, head_), supplied_of(args_, row_, head_, t)});
  }

  // Returns a new token's vector, as stored, as floats in order.
  void read_new(const Stored* as, const char* given, const void* row, int n, float* plain) {
    if (!as) return steps_.dtype->read(given, n, plain, work_.pairs);
    as->unpack(row, n, work_.pairs);
    std::memcpy(plain, work_.pairs, sizeof(float) * static_cast<std::size_t>(n));
  }

  // Dequantizes rows, zeros in free slots, for policies that read keys or values.
  Layout as_floats(const Stored* as, const Layout& rows, int dim, float* to, int64_t stride) const {
    for (int i = 0; i < args_.slots; ++i) {
      as->unpack(position_[i] >= 0 ? rows.row(i) : work_.zeros, dim, to + i * stride);
    }
    return {reinterpret_cast<char*>(to), stride * static_cast<int64_t>(sizeof(float))};
  }

  // Floats in order for products with rotated rows, or back.
  static void turn_by_hadamard(const Stored* as, float* x, int n) {
    if (!as || !as->turned) return;
    hadamard(x, n);
    const float part = 1.0f / static_cast<float>(turned_together(n));
    for (int d = 0; d < n; ++d) x[d] *= part;
  }

  bool queries_are_finite() const {
    float sum = 0;  // sum of zeros, or NaN if a number is not finite
    for (int g = 0; g < args_.group; ++g) {
      for (int d = 0; d < args_.key_dim; ++d) sum += 0.0f * work_.query[g * work_.query_stride + d];
    }
    return sum == 0;
  }

  const char* token(const void* base, const int64_t (&stride)[3], int head, int t) const {
    return static_cast<const char*>(base) + size(row_ * stride[0] + head * stride[1] + t * stride[2]);
  }

  const double* params() const { return params_of(args_, row_, head_); }

  void attend_to_all() {
    choosing_ = false;
    chosen_ = nullptr;
    own_ = nullptr;
    rows_ = args_.slots;
    row_chunk_ = work_.chunk;
    row_chunks_ = work_.chunks;
  }

  // Selected slots are few: they are split into chunks of their own.
  void attend_to_chosen() {
    rows_ = choice_.count();
    chosen_ = choice_.chosen();
    own_ = choice_.visible();
    row_chunk_ = static_cast<int>(round_up((rows_ + work_.chunks - 1) / work_.chunks, 4 * block));
    row_chunks_ = (rows_ + row_chunk_ - 1) / row_chunk_;
  }

  void begin_choice(int slot) {
    const Query query = query_of();
    choice_.begin(query, keys_as_ ? work_.ordered : work_.query, slot, !copied_,
                  {keys_as_, keys_, work_.turned_keys, work_.query_stride});
    copied_ = true;
    choosing_ = choice_.choosing();
    if (!choosing_) return;
    Slots held = query;
    held.oldest = 0;
    Head head(held, position_, work_.grades, false);
    choice_.always(head);
  }

  // Selected rows are prefetched when found.
  const Next* next_of(const Rows& rows) const { return chosen_ ? nullptr : &rows.next; }

  // Reduces attention over the group per slot; unselected slots get 0.
  void find_attn() const {
    if (!chosen_) {
      reduction(steps_.group)(work_.weights, work_.slot_stride, args_.group, work_.inverses, 0, args_.slots, work_.attn);
      return;
    }
    float* const reduced = choice_.spare();
    reduction(steps_.group)(work_.weights, work_.slot_stride, args_.group, work_.inverses, 0, rows_, reduced);
    std::memset(work_.attn, 0, sizeof(float) * static_cast<std::size_t>(args_.slots));
    for (int i = 0; i < rows_; ++i) work_.attn[chosen_[i]] = reduced[i];
  }

  // Computes scores of a block of rows.
  void dot(int chunk, int from, const Rows& rows) const {
    float* const scores = work_.weights + from;
    const int64_t stride = work_.query_stride, to = work_.slot_stride;
    const auto with = [&](const float* query) {
      (keys_as_ ? keys_as_->dot : steps_.dtype->dot)(query, stride, args_.group, rows.row, next_of(rows), args_.key_dim, scores, to);
    };
    if (in_order_) return dot_in_order(chunk, from, rows, args_.near ? turns_of(from, rows) : Turns{});
    if (!args_.near) return with(work_.query);
    const Turns turns = turns_of(from, rows);
    if (turns.most == 0) return with(work_.query);
    if (!turns.differ) return with(query_turned_back(chunk, turns.most));
    dot_in_order(chunk, from, rows, turns);
  }

  // Adds a block in which each query head has its own selection: another head's rows may be infinite, and 0 * inf is
  // NaN.
  void add_own(int from, const Rows& rows, float* sums) const {
    for (int g = 0; g < args_.group; ++g) {
      const int32_t* const visible = own_ + g * choice_.padded() + from;
      const void* row[block];
      for (int i = 0; i < block; ++i) row[i] = visible[i] ? rows.row[i] : work_.zeros;
      (values_as_ ? values_as_->add : steps_.dtype->add)(work_.weights + g * work_.slot_stride + from, work_.slot_stride, 1, row, nullptr,
                                                   args_.value_dim, sums + g * work_.out_stride, work_.out_stride);
    }
  }

  // Returns by how many positions visible keys of a block must move: the tokens evicted between each and the query.
  // Adjacent tokens share the number, which is mostly 0.
  struct Turns {
    int32_t by[block];
    int32_t most;
    bool differ;
  };

  Turns turns_of(int from, const Rows& rows) const {
    Turns turns;
    const int n = rows_ - from < block ? rows_ - from : block;
    const int between = newest_ - (live_ - 1);  // tokens evicted before the query's
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

  // Computes scores of a block whose keys are floats in order, each rotated by its own angle.
  void dot_in_order(int chunk, int from, const Rows& rows, const Turns& turns) const {
    const int64_t stride = work_.query_stride;
    float* const keys = work_.turned_keys + int64_t{chunk} * block * stride;
    const void* row[block];
    for (int i = 0; i < block; ++i) row[i] = keys + i * stride;
    if (keys_as_) {
      for (int i = 0; i < block; ++i) {
        keys_as_->unpack(rows.row[i], args_.key_dim, keys + i * stride);
        if (turns.by[i]) turn(keys + i * stride, turns.by[i], 1.0f, rope());
      }
    } else {
      Rows halves;
      if (args_.half_keys) halves = rows_of(half_keys_, from);
      steps_.dtype->turn(rows.row, args_.half_keys ? halves.row : nullptr, block, args_.key_dim, turns.by, rope(),
                        work_.half_key + chunk * stride, keys, stride);
    }
    float32.dot(work_.ordered, stride, args_.group, row, nullptr, args_.key_dim, work_.weights + from, work_.slot_stride);
  }

  // Returns the distances between slots of a block and the query: in the text, or among live tokens.
  void find_distances(int from, float* distances) const {
    const int32_t* const place = rank_ ? rank_ : position_;
    const int own = rank_ ? live_ - 1 : newest_;
    for (int i = 0; i < block; ++i) {
      const bool any = from + i < rows_;
      const int slot = any && chosen_ ? chosen_[from + i] : from + i;
      distances[i] = any ? static_cast<float>(own - place[slot]) : 0.0f;
    }
  }

  const float* query_turned_back(int chunk, int by) const {
    float* const turned = work_.turned_query + int64_t{chunk} * args_.group * work_.query_stride;
    float* const plain = work_.turned_keys + int64_t{chunk} * block * work_.query_stride;
    for (int g = 0; g < args_.group; ++g) {
      std::memcpy(plain, ordered_query(g), sizeof(float) * static_cast<std::size_t>(args_.key_dim));
      turn(plain, by, -1.0f, rope());
      steps_.dtype->pack(plain, args_.key_dim, turned + g * work_.query_stride);
      turn_by_hadamard(keys_as_, turned + g * work_.query_stride, args_.key_dim);
    }
    return turned;
  }

  Rope rope() const {
    return {args_.near, args_.far, args_.rope_pairs, args_.rope_offset, args_.rope_interleaved != 0};
  }

  float* ordered_query(int g) const { return work_.ordered + g * work_.query_stride; }

  // Beyond the last row, arrays extend to a whole block.
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
    find_next(layout, from, end_, free_, rows.next);
    rows.any = any != 0;
    return rows;
  }

  // The same for selected rows; prefetches the next block.
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

  // The same through the row's block table.
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
    find_next(layout, from, end_, free_, rows.next);
    rows.any = any != 0;
    return rows;
  }

  // Returns the maximum over all slots and the sink.
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
    slots.since = args_.since ? args_.since[row_] : 0;
    slots.column_stride = column_stride_;
    slots.work = work_.scratch;
    slots.work_stride = work_.slot_stride;
    slots.params = params();
    slots.constant = constants_of(args_, head_);
    slots.key_dim = args_.key_dim;
    slots.value_dim = args_.value_dim;
    slots.keys = keys_;
    slots.values = values_;
    if (keys_as_ && steps_.reads_rows) {
      slots.keys = as_floats(keys_as_, keys_, args_.key_dim, work_.read_keys, work_.query_stride);
      slots.values = as_floats(values_as_, values_, args_.value_dim, work_.read_values, work_.out_stride);
    }
    slots.random_key = absorb(absorb(args_.seed, args_.layer), args_.head_offset + head_);
  }

  Query query_of() const {
    Query query{};
    fill(query, oldest_);
    query.attn = work_.attn;
    query.logit = work_.logit;
    query.query = work_.plain_query;
    query.group = args_.group;
    query.query_head = (args_.head_offset + head_) * args_.group;
    return query;
  }

  void observe() const { steps_.observe(query_of()); }

  // Under a hard cap, evicts before a token is placed.
  void make_room() {
    find_free_slot(position_, args_.slots, live_);
    newest_ = next_ - 1;
    if (live_ > 0) settle(true);
  }

  void settle(bool before_placing = false) {
    Slots slots;
    fill(slots, 0);
    Head head(slots, position_, work_.grades, before_placing);
    steps_.settle(head);
    if (rank_) close_gaps(position_, rank_, args_.slots, work_.grades);
  }

  const DecodeArgs& args_;
  const Steps& steps_;
  Workspace work_;
  int row_, head_;
  Choice choice_;
  const Stored *keys_as_ = nullptr, *values_as_ = nullptr;  // null: keys and values are in the model's dtype
  Layout keys_{}, values_{}, half_keys_{};
  int32_t* position_;
  float* state_;
  int32_t* rank_;
  int64_t column_stride_;
  int next_;  // position of the row's next token
  int newest_ = -1, oldest_ = 0, live_ = 0;
  bool placed_ = false, choosing_ = false;
  bool in_order_ = false;  // a query is infinite after the Hadamard transform, so keys are transformed back instead
  bool copied_ = true;  // derived data beside the keys is valid
  const int32_t* chosen_ = nullptr;  // selected slots in order; null: all
  const int32_t* own_ = nullptr;     // per query head, its own selection among these; null: all of them
  uint8_t* made_ = nullptr;          // receives the selection for other layers; null: the query attends to it itself
  int end_ = 0, free_ = 0;           // behind the last live slot, and rows from there to the next head's
  int rows_ = 0, row_chunk_ = 0, row_chunks_ = 0;
  int status_ = ok;
};

}  // namespace kvdsl
