// H2O: one decode step on the CPU.
//
// Made by kvdsl 0.1.0 from h2o.kv (0ae6c0ce7df6). Do not edit: run `kvdsl compile h2o.kv`.
//
// Keeps the heavy hitters, to which the most attention was paid in all, and the most recent tokens.
//
// Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", 2023; equation 2 of
// "Attention Score is Not All You Need for Token Importance Indicator in KV Cache Reduction".
//
// The lowest leaves first: sum(attn)
// keep last recent
#include <kvdsl/decode.hpp>
#include <kvdsl/prompt.hpp>

namespace {

struct H2OPolicy : kvdsl::Policy {
  struct Column {
    enum {
      sum_attn,  // sum of attn
    };
  };
  static constexpr int columns = 1;
  struct Number {
    enum { recent, capacity };
  };
  static constexpr int scratch_columns = 1;
  static constexpr kvdsl::Group group = kvdsl::Group::mean;
  static constexpr bool needs_attn = true;

  static void observe(const kvdsl::Query& row) {
    float* const sum_attn = row.column(Column::sum_attn);
#pragma omp simd
    for (int i = 0; i < row.slots; ++i) {
      const bool seen = row.visible(i);
      sum_attn[i] += seen ? row.attn[i] : 0.0f;
    }
  }

  static void settle(kvdsl::Head& head) {
    const int leaving = head.overflow(kvdsl::count(head.param(Number::capacity)));
    if (leaving == 0) return;
    const float* const sum_attn = head.column(Column::sum_attn);
    float* const score = head.scratch(0);
#pragma omp simd
    for (int i = 0; i < head.slots; ++i) {
      score[i] = sum_attn[i];
    }
    head.protect_last(kvdsl::count(head.param(Number::recent)));
    head.evict(score, leaving);
  }
};

}  // namespace

extern "C" {
int KVDSL_ENTRY(decode_f32)(const kvdsl::DecodeArgs* args) { return kvdsl::decode<float, H2OPolicy>(*args); }
int KVDSL_ENTRY(decode_bf16)(const kvdsl::DecodeArgs* args) { return kvdsl::decode<kvdsl::bf16, H2OPolicy>(*args); }
int KVDSL_ENTRY(decode_f16)(const kvdsl::DecodeArgs* args) { return kvdsl::decode<kvdsl::f16, H2OPolicy>(*args); }
int KVDSL_ENTRY(replace_f32)(const kvdsl::DecodeArgs* args, const int32_t* slots) {
  return kvdsl::replace<float, H2OPolicy>(*args, slots);
}
int KVDSL_ENTRY(replace_bf16)(const kvdsl::DecodeArgs* args, const int32_t* slots) {
  return kvdsl::replace<kvdsl::bf16, H2OPolicy>(*args, slots);
}
int KVDSL_ENTRY(replace_f16)(const kvdsl::DecodeArgs* args, const int32_t* slots) {
  return kvdsl::replace<kvdsl::f16, H2OPolicy>(*args, slots);
}
int KVDSL_ENTRY(observe_f32)(const kvdsl::DecodeArgs* args, const kvdsl::PromptArgs* prompt) {
  return kvdsl::observe<float, H2OPolicy>(*args, *prompt);
}
int KVDSL_ENTRY(observe_bf16)(const kvdsl::DecodeArgs* args, const kvdsl::PromptArgs* prompt) {
  return kvdsl::observe<kvdsl::bf16, H2OPolicy>(*args, *prompt);
}
int KVDSL_ENTRY(observe_f16)(const kvdsl::DecodeArgs* args, const kvdsl::PromptArgs* prompt) {
  return kvdsl::observe<kvdsl::f16, H2OPolicy>(*args, *prompt);
}
int KVDSL_ENTRY(settle)(const kvdsl::DecodeArgs* args, const float* attn) {
  return kvdsl::settle<H2OPolicy>(*args, attn);
}
int KVDSL_ENTRY(abi)() { return KVDSL_ABI; }
}
