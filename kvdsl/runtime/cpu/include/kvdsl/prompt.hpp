// What the queries of a prompt give the slots, folded into the policy's columns; compiled once for all policies: src/prompt.cpp.
#pragma once

#include <cstdint>

#include "decode.hpp"

namespace kvdsl {

// What is told of a prompt, beside the DecodeArgs: in those `key` and `value` are what is cached, the tokens' own behind the
// others [B, H, N, D], `query` [B, Hq, T, D], and of the other tensors `position`, `state`, `ring_rows`, `params`, `constants` and `sinks`
// are set.
struct PromptArgs {
  const float* lse;        // [B, H, G, T]
  const int32_t* newest;   // [B, T] the new tokens' positions, -1 for padding
  const uint8_t* adds_up;  // [columns] 1 where a column is a sum over queries
  int32_t first;           // the first token whose query counts
};

int observe(const DecodeArgs& args, const PromptArgs& prompt, const Steps& steps);

// Folds every query of a prompt from prompt.first on into the columns, in the order of the text.
template <class T, class Policy>
int observe(const DecodeArgs& args, const PromptArgs& prompt) {
  return observe(args, prompt, steps<T, Policy>);
}

}  // namespace kvdsl
