// A KV head of a row in a prompt: pointers to its parts of the arguments.
#pragma once

#include <climits>
#include <cstdint>

#include <kvdsl/prompt.hpp>

namespace kvdsl {

struct PromptHead {
  const DecodeArgs& args;
  const PromptArgs& prompt;
  const Steps& steps;
  int number;  // over all rows
  int row = number / args.kv_heads, head = number % args.kv_heads;
  int cached = args.slots - args.tokens;  // slots before the new tokens'
  const int32_t* position = args.position + int64_t{number} * args.slots;
  int begin = first_of_text();  // first slot that is not padding

  int newest(int t) const { return prompt.newest[int64_t{row} * args.tokens + t]; }

  // Returns the lowest position that a query sees; for padding, above all positions.
  int oldest_of(int newest) const {
    if (newest < 0) return INT_MAX;
    return args.window > 0 && newest >= args.window ? newest - args.window + 1 : 0;
  }

  template <class X>
  const char* at(const X* base, const int64_t (&stride)[3], int which, int index) const {
    return static_cast<const char*>(base) + (row * stride[0] + which * stride[1] + index * stride[2]) * steps.dtype->size;
  }

  const void* key_of(int slot) const { return at(args.key, args.key_stride, head, slot); }
  const void* value_of(int slot) const { return at(args.value, args.value_stride, head, slot); }

  int first_of_text() const {
    int slot = 0;
    while (slot < args.slots && position[slot] < 0) ++slot;
    return slot;
  }

  // Returns the rows of slots from `first` on.
  Layout layout(const void* base, const int64_t (&stride)[3], int from) const {
    return {const_cast<char*>(at(base, stride, head, from)), stride[2] * steps.dtype->size};
  }
};

}  // namespace kvdsl
