// The functions of a policy's library. What they do is compiled apart from it, once for all policies: src/decode.cpp.
#pragma once

#include <cstdint>

#include "args.hpp"
#include "steps.hpp"

namespace kvdsl {

int decode(const DecodeArgs& args, const Steps& steps);
int replace(const DecodeArgs& args, const int32_t* slots, const Steps& steps);
int settle(const DecodeArgs& args, const float* attn, const Steps& steps);

// T tokens for every row and KV head, one by one. Returns a Status; anything but ok leaves the cache in no defined state.
template <class T, class Policy>
int decode(const DecodeArgs& args) {
  return decode(args, decode_steps<T, Policy>);
}

// Replaces tokens of the dtype's size.
template <class T, class Policy>
int replace(const DecodeArgs& args, const int32_t* slots) {
  return replace(args, slots, decode_steps<T, Policy>);
}

// Observe and settle without a query: attn [batch, kv_heads, slots] is given; or null, to settle only, as at the end of a prompt,
// whose queries were observed before. Of the tensors that hold slots only `position` and `state` are read. A row does neither if the
// call's one token is padding there.
template <class Policy>
int settle(const DecodeArgs& args, const float* attn) {
  return settle(args, attn, attn ? decode_steps<float, Policy> : steps<float, Policy>);
}

}  // namespace kvdsl
