// Arguments of a decode call. Python parses this struct, so each field has a line of its own.
#pragma once

#include <cstdint>

// Names the exported functions. Redefine it before each policy to compile several policies into one unit.
#ifndef KVDSL_ENTRY
#define KVDSL_ENTRY(name) kvdsl_##name
#endif

namespace kvdsl {

// Status flags returned by every function.
enum Status : int { ok = 0, no_free_slot = 1, out_of_memory = 2, not_live = 4, no_free_block = 8, not_tame = 16 };

// Sizes: B rows, Hq query heads, H KV heads, G = Hq / H, T tokens in this call, N slots, D and Dv dims, P numbers.
// "Model dtype" is the T of decode<T, Policy>. Strides count elements over (row, head, token); the last dimension is
// contiguous.
struct DecodeArgs {
  const void* query;  // [B, Hq, T, D] model dtype
  const void* key;    // [B, H, T, D] the new keys
  const void* value;  // [B, H, T, Dv] the new values
  void* out;          // [B, T, Hq, Dv] contiguous, model dtype
  void* keys;         // [B, H, N, D] contiguous, model dtype: the cache; with a table [H, blocks, block_size, D]
  void* values;       // [B, H, N, Dv]; with a table [H, blocks, block_size, Dv]
  int64_t* table;     // [B, blocks per row] the pool's block of each block of slots, -1 for none; null: slots are contiguous
  const int64_t* first_rows;  // [B, H] the first row of each head in `keys` and `values`; null if every head has N rows
  int32_t* position;  // [B, H, N] the token's position in its row's text, -1 for a free slot
  float* state;       // [rows, B, H, N] the columns, then the rows of every ring; null if the policy has neither
  const int32_t* ring_rows;  // [rings] the first row of each ring in `state`; null if the policy has none
  const int32_t* since;  // [B] the first query that counts in rings; null for all
  int32_t* seen;      // [B] real tokens before this call; the call increments it
  const uint8_t* real;   // [B, T] or null: 0 marks padding, which is neither placed nor observed and outputs zeros
  const double* params;  // [B, P] the policy's numbers, or [B, H, P] if heads differ; null if it has none
  const float* constants;  // [tensors, H, D] the policy's tensors from files; null if it reads none
  const float* supplied;   // [values, B, H, T] per-token values from the caller; null if the policy reads none
  const float* sinks;    // [Hq] or null: learned logits that join the softmax denominator
  const float* slopes;   // [Hq] or null: ALiBi slopes, subtracted from a logit per place between slot and query
  int32_t* rank;         // [B, H, N] live slots with an earlier token, -1 for a free slot; null unless positions are compact
  void* half_keys;       // [B, H, N, 2 rope_pairs] model dtype, see src/rotate.hpp; null unless the layer caches them
  const float* near;     // tables of src/rotate.hpp; null unless positions are compact and the model rotates
  const float* far;
  int32_t* sketch;        // [B, H, S] dims of the sketch, ascending, padded with -1; null without a sketch
  const int32_t* prompt;  // [B] real tokens of the prompt; null without a sketch
  void* sketch_keys;      // [B, H, N / block, S, block] model dtype, see src/sketch.hpp; null unless the layer selects by them
  void* page_bounds;      // [B, H, pages, 2, D] model dtype, see src/pages.hpp; null unless the layer selects by pages
  int32_t* copied;        // [B] 1 if the two above are up to date; null if there are none
  uint8_t* made;          // output [T, B, H, C, N]: 1 where a token selects a slot for other layers (C: 1, or G if each query
                          // head selects for itself); null if the layer does not
  const uint8_t* taken;   // [T, B, H, C, N] the selection of another layer that the tokens reuse; null if they do not
  const float* beside;    // [Hq, out_stride of src/workspace.hpp], in pairs, or null: normalized attention to slots elsewhere,
                          // whose log-sum-exps are in `sinks`
  double* seconds;        // [stages] or null: the threads' times are added, see src/laps.hpp
  int64_t query_stride[3];
  int64_t key_stride[3];
  int64_t value_stride[3];
  int64_t block_stride;   // bytes between blocks, if the table refers to blocks outside a pool; else 0
  int64_t head_stride;    // bytes between heads in such a block
  int32_t batch;
  int32_t kv_heads;
  int32_t group;
  int32_t key_dim;
  int32_t value_dim;
  int32_t slots;
  int32_t tokens;
  int32_t params_per_row;
  int32_t params_per_head;  // 0 if all heads have the same numbers
  int32_t window;       // how many of the newest tokens a query sees, 0 = all
  int32_t layer;        // seed, layer, head_offset + head and position are the key of random()
  int32_t head_offset;  // the first KV head's index in the whole model (tensor parallelism)
  int32_t threads;
  int32_t rope_pairs;        // see src/rotate.hpp
  int32_t rope_offset;
  int32_t rope_interleaved;  // 0 or 1
  int32_t sketch_width;      // S
  int32_t pages;
  int32_t block_size;  // slots per block, if there is a table
  int32_t blocks;      // blocks in the pool
  int32_t key_dtype;   // 0: model dtype, of values too; else packed rows, see src/packed.hpp, and T is float
  int32_t value_dtype;
  uint32_t seed;
  float scale;    // logit = scale * q.k
  float softcap;  // logit = softcap * tanh(logit / softcap), 0 = none
};

// Returns the policy's numbers for a row and head, null if it has none.
inline const double* params_of(const DecodeArgs& args, int row, int head) {
  return args.params ? args.params + int64_t{row} * args.params_per_row + int64_t{head} * args.params_per_head : nullptr;
}

}  // namespace kvdsl
