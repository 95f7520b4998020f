// Working memory of one unit.
#pragma once

#include <cstdint>
#include <cstring>

#include <kvdsl/args.hpp>
#include <kvdsl/head.hpp>
#include <kvdsl/steps.hpp>
#include <kvdsl/types.hpp>

#include "arena.hpp"
#include "select.hpp"
#include "simd.hpp"

namespace kvdsl {

// Rows of slots are padded to whole blocks, rows of dims to whole pairs (and stored in pairs, see simd.hpp).
struct Workspace {
  int chunk, chunks;  // slots per chunk, and number of chunks
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
  Grade* grades;         // [Head::grade_rows, slot_stride]
  float* tops;         // [chunks, group] maxima of scores
  float* totals;       // [chunks, group] sums of exponentials
  float* inverses;     // [group] 1 / sum of all exponentials
  float* ones;         // [group]
  float* sums;         // [chunks, group, out_stride] weighted sums of values
  float* read_keys;    // [slots, query_stride] dequantized keys for observe and settle
  float* read_values;  // [slots, out_stride]
  char* zeros;         // the row of an invisible slot
  float* ordered;      // [group, query_stride] the query as floats in order, padded with zeros
  float* turned_query; // [chunks, group, query_stride]
  float* turned_keys;  // [chunks, block, query_stride]
  float* half_key;     // [chunks, query_stride]
  ChoiceWork choice;

  // Few enough chunks to combine cheaply, small enough to share.
  static int chunk_of(int slots) { return static_cast<int>(round_up((int64_t{slots} + 63) / 64, 256)); }

  [[gnu::noinline]] Workspace(const DecodeArgs& args, const Steps& steps, Arena& arena)
      : chunk(chunk_of(args.slots)), chunks((args.slots + chunk - 1) / chunk),
        choice(args, steps, chunk, chunks, arena) {
    // Powers of two would map every head's row to the same cache sets.
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
    grades = arena.take<Grade>(Head::grade_rows * slot_stride);
    tops = arena.take<float>(chunks * args.group);
    totals = arena.take<float>(chunks * args.group);
    inverses = arena.take<float>(args.group);
    ones = arena.take<float>(args.group);
    sums = arena.take<float>(chunks * args.group * out_stride);
    const int turning = args.near || args.key_dtype ? chunks : 0;
    ordered = arena.take<float>((turning ? args.group : 0) * query_stride);
    turned_query = arena.take<float>(turning * args.group * query_stride);
    turned_keys = arena.take<float>(turning * block * query_stride);
    half_key = arena.take<float>((args.half_keys ? turning : 0) * query_stride);
    const int read = args.key_dtype && steps.reads_rows ? args.slots : 0;
    read_keys = arena.take<float>(read * query_stride);
    read_values = arena.take<float>(read * out_stride);
    zeros = arena.take<char>(longest * steps.dtype->size);
    if (!zeros) return;
    std::memset(zeros, 0, static_cast<std::size_t>(longest * steps.dtype->size));
    for (int g = 0; g < args.group; ++g) ones[g] = 1.0f;
  }

  static int64_t bytes(const DecodeArgs& args, const Steps& steps) {
    Arena arena(nullptr);
    Workspace(args, steps, arena);
    return arena.used();
  }
};

}  // namespace kvdsl
