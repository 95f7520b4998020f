// StreamingLLM: decode step on CPUs.
//
// Made by kvdsl 0.1.0 from streaming_llm.kv (a865ebe3977d). Do not edit: `kvdsl compile` rewrites it.
//
// Keeps the first tokens, which are attention sinks, and the most recent ones, at positions counted inside the cache.
//
// A text can be longer than the model was trained on: the newest token is always at position `live - 1`.
//
// paper: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", section 3.2
// year: 2023, arXiv 2309.17453
// reach: exact
// checked: formula
//
// Evicts the lowest first: position
// keep first sinks
// keep last 1
#include <kvdsl/decode.hpp>
#include <kvdsl/prompt.hpp>

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
int KVDSL_ENTRY(decode_f32)(const kvdsl::DecodeArgs* args) { return kvdsl::decode<float, StreamingLLMPolicy>(*args); }
int KVDSL_ENTRY(decode_bf16)(const kvdsl::DecodeArgs* args) { return kvdsl::decode<kvdsl::bf16, StreamingLLMPolicy>(*args); }
int KVDSL_ENTRY(decode_f16)(const kvdsl::DecodeArgs* args) { return kvdsl::decode<kvdsl::f16, StreamingLLMPolicy>(*args); }
int KVDSL_ENTRY(replace_f32)(const kvdsl::DecodeArgs* args, const int32_t* slots) {
  return kvdsl::replace<float, StreamingLLMPolicy>(*args, slots);
}
int KVDSL_ENTRY(replace_bf16)(const kvdsl::DecodeArgs* args, const int32_t* slots) {
  return kvdsl::replace<kvdsl::bf16, StreamingLLMPolicy>(*args, slots);
}
int KVDSL_ENTRY(replace_f16)(const kvdsl::DecodeArgs* args, const int32_t* slots) {
  return kvdsl::replace<kvdsl::f16, StreamingLLMPolicy>(*args, slots);
}
int KVDSL_ENTRY(prefill_f32)(const kvdsl::DecodeArgs* args, const kvdsl::PromptArgs* prompt) {
  return kvdsl::prefill<float, StreamingLLMPolicy>(*args, *prompt);
}
int KVDSL_ENTRY(prefill_bf16)(const kvdsl::DecodeArgs* args, const kvdsl::PromptArgs* prompt) {
  return kvdsl::prefill<kvdsl::bf16, StreamingLLMPolicy>(*args, *prompt);
}
int KVDSL_ENTRY(prefill_f16)(const kvdsl::DecodeArgs* args, const kvdsl::PromptArgs* prompt) {
  return kvdsl::prefill<kvdsl::f16, StreamingLLMPolicy>(*args, *prompt);
}
int KVDSL_ENTRY(settle)(const kvdsl::DecodeArgs* args, const float* attn) {
  return kvdsl::settle<StreamingLLMPolicy>(*args, attn);
}
}
