// A prompt: its queries attend, and what they give the slots is folded into the policy's columns; compiled once for all policies:
// src/prompt.cpp.
#pragma once

#include <cstdint>

#include "decode.hpp"

namespace kvdsl {

// What is told of a prompt, beside the DecodeArgs: in those `key` and `value` are what is cached, the tokens' own behind the
// others [B, H, N, D], `query` [B, Hq, T, D], and of the other tensors `position`, `state`, `ring_rows`, `params`, `constants` and `sinks`
// are set.
struct PromptArgs {
  void* out;               // [B, T, Hq, Dv] model dtype, gets what the queries attend to; null where that is done elsewhere
  const int32_t* newest;   // [B, T] the new tokens' positions, -1 for padding
  const uint8_t* adds_up;  // [columns] 1 where a column is a sum over queries
  int32_t first;           // the first token whose query is observed; T if the policy observes nothing
};

int prefill(const DecodeArgs& args, const PromptArgs& prompt, const Steps& steps);

// Lets every query of a prompt attend if there is an `out`, and observes those from prompt.first on, in the order of the text. Does
// nothing, and returns `not_tame`, where a score to attend with may not be finite.
template <class T, class Policy>
int prefill(const DecodeArgs& args, const PromptArgs& prompt) {
  return prefill(args, prompt, steps<T, Policy>);
}

}  // namespace kvdsl
