// Operations on a head's slots: place, free, ranks and blocks.
#pragma once

#include <climits>
#include <cstdint>

#include <kvdsl/args.hpp>
#include <kvdsl/layout.hpp>
#include <kvdsl/view.hpp>

namespace kvdsl {

// Returns the policy's tensors for a KV head.
inline Constants constants_of(const DecodeArgs& args, int head) {
  const float* const rows = args.constants ? args.constants + int64_t{head} * args.key_dim : nullptr;
  return {rows, int64_t{args.kv_heads} * args.key_dim};
}

inline Supplied supplied_of(const DecodeArgs& args, int row, int head, int t) {
  const int64_t at = (int64_t{row} * args.kv_heads + head) * args.tokens + t;
  return {args.supplied ? args.supplied + at : nullptr, int64_t{args.batch} * args.kv_heads * args.tokens};
}

// Returns the index behind the last live slot; there is one.
inline int end_of_held(const int32_t* position, int slots) {
  while (position[slots - 1] < 0) --slots;
  return slots;
}

// Returns the lowest free slot, or INT_MAX; counts live ones.
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

// Closes gaps in ranks after slots were freed. `moved` has room for one number per slot.
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

// Frees the row's blocks in which no head holds a token.
inline void give_blocks_back(const DecodeArgs& args) {
  if (!args.table) return;
  const int64_t of_a_row = int64_t{args.kv_heads} * args.slots;
  for (int64_t b = 0; b < args.batch; ++b) {
    pool(args).give_back(b, args.position + b * of_a_row, args.kv_heads, args.slots, args.block_size);
  }
}

}  // namespace kvdsl
