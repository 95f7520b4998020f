// The functions of a policy's library. Their driver (src/decode.cpp) is compiled once for all policies.
#pragma once

#include <cstdint>

#include "args.hpp"
#include "steps.hpp"

namespace kvdsl {

int decode(const DecodeArgs& args, const Steps& steps);
int replace(const DecodeArgs& args, const int32_t* slots, const Steps& steps);
int settle(const DecodeArgs& args, const float* attn, const Steps& steps);

// Decodes T tokens for every row and KV head, one by one. Unless it returns ok, the cache is in an undefined state.
template <class T, class Policy>
int decode(const DecodeArgs& args) {
  return decode(args, decode_steps<T, Policy>);
}

// Replaces the tokens in `slots`, [B, H, T], by new ones.
template <class T, class Policy>
int replace(const DecodeArgs& args, const int32_t* slots) {
  return replace(args, slots, decode_steps<T, Policy>);
}

// Observes and settles without a query: attn [batch, kv_heads, slots] is given, or null to settle only, at the end of a
// prompt. Of the tensors by slot only `position` and `state` are read. A row is skipped if the call's token is padding
// there.
template <class Policy>
int settle(const DecodeArgs& args, const float* attn) {
  return settle(args, attn, attn ? decode_steps<float, Policy> : steps<float, Policy>);
}

}  // namespace kvdsl
