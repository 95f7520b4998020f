// StreamingLLM: one decode step on the CPU.
//
// Made by kvdsl 0.1.0 from streaming_llm.kv (913eff0e7da2). Do not edit: run `kvdsl compile streaming_llm.kv`.
//
// Keeps the first tokens, which attention sinks into, and the most recent ones.
//
// Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023. Positions are the tokens' places in the text;
// the paper counts them inside of the cache.
//
// The lowest leaves first: position
// keep first sinks
// keep last 1
#include <kvdsl/decode.hpp>

namespace {

struct StreamingLLMPolicy : kvdsl::Policy {
  struct Number {
    enum { sinks, capacity };
  };
  static constexpr int scratch_columns = 1;

  static void settle(kvdsl::Head& head) {
    const int leaving = head.overflow(kvdsl::count(head.param(Number::capacity)));
    if (leaving == 0) return;
    float* const score = head.scratch(0);
#pragma omp simd
    for (int i = 0; i < head.slots; ++i) {
      score[i] = static_cast<float>(head.position[i]);
    }
    head.protect_first(kvdsl::count(head.param(Number::sinks)));
    head.protect_last(1);
    head.evict(score, leaving);
  }
};

}  // namespace

extern "C" {
int kvdsl_decode_f32(const kvdsl::DecodeArgs* args) { return kvdsl::decode<float, StreamingLLMPolicy>(*args); }
int kvdsl_decode_bf16(const kvdsl::DecodeArgs* args) { return kvdsl::decode<kvdsl::bf16, StreamingLLMPolicy>(*args); }
int kvdsl_decode_f16(const kvdsl::DecodeArgs* args) { return kvdsl::decode<kvdsl::f16, StreamingLLMPolicy>(*args); }
int kvdsl_settle(const kvdsl::DecodeArgs* args, const float* attn) {
  return kvdsl::settle<StreamingLLMPolicy>(*args, attn);
}
int kvdsl_abi() { return KVDSL_ABI; }
}
