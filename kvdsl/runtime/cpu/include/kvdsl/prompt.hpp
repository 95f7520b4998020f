// Prefill: attention and observation of a prompt. The driver (src/prompt.cpp) is compiled once for all policies.
#pragma once

#include <cstdint>

#include "decode.hpp"

namespace kvdsl {

// Arguments beside DecodeArgs. There, `key` and `value` are the cache with the new tokens at its end, [B, H, N, D];
// `query` is [B, Hq, T, D]; of the other tensors `position`, `state`, `ring_rows`, `params`, `constants` and `sinks`
// are set.
struct PromptArgs {
  void* out;               // [B, T, Hq, Dv] model dtype: output, or null if attention runs elsewhere
  const int32_t* newest;   // [B, T] the new tokens' positions, -1 for padding
  const uint8_t* adds_up;  // [columns] 1 for a column that is a sum over queries
  int32_t first;           // the first token whose query is observed; T for none
};

int prefill(const DecodeArgs& args, const PromptArgs& prompt, const Steps& steps);

// Attends for every query of a prompt if there is an `out`, and observes queries from prompt.first on in text order.
// Does nothing and returns `not_tame` if a logit may not be finite.
template <class T, class Policy>
int prefill(const DecodeArgs& args, const PromptArgs& prompt) {
  return prefill(args, prompt, steps<T, Policy>);
}

}  // namespace kvdsl
