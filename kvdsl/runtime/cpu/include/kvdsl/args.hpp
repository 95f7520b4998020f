// The arguments of one decode call. Python reads the struct's fields from here, so that each stands in a line of its own.
#pragma once

#include <cstdint>

// What a policy's functions are called for the loader. Whoever compiles several policies as one unit defines it anew
// before including each.
#ifndef KVDSL_ENTRY
#define KVDSL_ENTRY(name) kvdsl_##name
#endif

namespace kvdsl {

// What every function returns; may be combined.
enum Status : int { ok = 0, no_free_slot = 1, out_of_memory = 2, not_live = 4, no_free_block = 8, not_tame = 16 };

// Letters: B rows, Hq query heads, H KV heads, G = Hq / H, T tokens in this call, N slots, D and Dv sizes, P numbers.
// "Model dtype" is the T of decode<T, Policy>. Strides count elements and go over (row, head, token);
// the last dimension is always contiguous.
struct DecodeArgs {
  const void* query;  // [B, Hq, T, D] model dtype
  const void* key;    // [B, H, T, D] the new keys
  const void* value;  // [B, H, T, Dv] the new values
  void* out;          // [B, T, Hq, Dv] contiguous, model dtype
  void* keys;         // [B, H, N, D] contiguous, model dtype: the cache; with a table [H, blocks, block, D]
  void* values;       // [B, H, N, Dv], or likewise
  int64_t* table;     // [B, blocks of a row] where each block of a row's slots lies, -1 for none; null: slots are in one piece
  const int64_t* first_rows;  // [B, H] rows of `keys` and `values` before a head's; null where all heads have N
  int32_t* position;  // [B, H, N] a token's position in its row's text, -1 where the slot is free
  float* state;       // [rows, B, H, N] the columns, then the rows of every ring; null when the policy has neither
  const int32_t* ring_rows;  // [rings] the row of `state` with which each ring begins; null when the policy has none
  const int32_t* since;  // [B] the first query that the rings count; null: all of them
  int32_t* seen;      // [B] real tokens before this call, advanced by it
  const uint8_t* real;   // [B, T] or null: 0 marks padding, which is not placed, not observed and gives zeros
  const double* params;  // [B, P] the policy's numbers, or [B, H, P] where heads differ; null when it has none
  const float* constants;  // [tensors, H, D] what the policy's files hold for the layer, null when it reads none
  const float* supplied;   // [values, B, H, T] what the caller gives of the new tokens, null where the policy asks for nothing
  const float* sinks;    // [Hq] or null: learned logits that join the softmax's denominator only
  const float* slopes;   // [Hq] or null: what each place that a slot stands behind the query takes from its logit
  int32_t* rank;         // [B, H, N] live slots with an earlier token, -1 where free; null unless positions are compact
  void* half_keys;       // [B, H, N, 2 rope_pairs] model dtype, see src/rotate.hpp; null unless the layer keeps them
  const float* near;     // the tables of src/rotate.hpp; null unless positions are compact and the model rotates
  const float* far;
  int32_t* sketch;        // [B, H, S] the dims of the sketch, ascending, -1 behind them; null without one
  const int32_t* prompt;  // [B] real tokens of the prompt; null without a sketch
  void* sketch_keys;      // [B, H, N / block, S, block] model dtype, see src/sketch.hpp; null unless the layer selects by it
  void* page_bounds;      // [B, H, pages, 2, D] model dtype, see src/pages.hpp; null unless the layer selects by pages
  int32_t* copied;        // [B] 1 where the last two hold what the keys are; null where there are none
  uint8_t* made;          // [T, B, H, C, N] gets 1 where a token chooses a slot for the layers above (C: 1, or G where each query head
                          // chooses for itself); null where the layer does not
  const uint8_t* taken;   // likewise: what a layer below has chosen, which the tokens attend to; null where they do not
  const float* beside;    // [Hq, out_stride of src/workspace.hpp], in pairs, or null: what the queries attend to elsewhere, each share by
                          // itself; `sinks` has the logarithms of its sums of exponentials
  double* seconds;        // [stages] or null: gets the threads' time added up, see src/laps.hpp
  int64_t query_stride[3];
  int64_t key_stride[3];
  int64_t value_stride[3];
  int64_t block_stride;   // bytes from block to block, where a table leads to blocks that are not those of one pool; 0 elsewhere
  int64_t head_stride;    // bytes from head to head in such a block
  int32_t batch;
  int32_t kv_heads;
  int32_t group;
  int32_t key_dim;
  int32_t value_dim;
  int32_t slots;
  int32_t tokens;
  int32_t params_per_row;
  int32_t params_per_head;  // 0 where all heads have the same
  int32_t window;       // attend to this many newest tokens only, 0 = all
  int32_t layer;        // with head_offset + head, seed and position the key of random()
  int32_t head_offset;  // the first KV head's number in the whole model (tensor parallelism)
  int32_t threads;
  int32_t rope_pairs;        // see src/rotate.hpp
  int32_t rope_offset;
  int32_t rope_interleaved;  // 0 or 1
  int32_t sketch_width;      // S
  int32_t pages;
  int32_t block_size;  // slots of a block, where there is a table
  int32_t blocks;      // of the pool
  int32_t kv_dtype;    // 0: keys and values are in the model's dtype; else rows of bytes, see src/packed.hpp, and the model's is float
  uint32_t seed;
  float scale;    // logit = scale * q.k
  float softcap;  // logit = softcap * tanh(logit / softcap), 0 = none
};

// The policy's numbers of a row and head, null when it has none.
inline const double* params_of(const DecodeArgs& args, int row, int head) {
  return args.params ? args.params + int64_t{row} * args.params_per_row + int64_t{head} * args.params_per_head : nullptr;
}

}  // namespace kvdsl
