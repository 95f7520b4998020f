// TOVA: one decode step on the CPU.
//
// Made by kvdsl 0.1.0 from tova.kv (c7607d628662). Do not edit: run `kvdsl compile tova.kv`.
//
// Evicts what the newest token attends to least, the newest token itself not excepted.
//
// Oren et al., "Transformers are Multi-State RNNs", 2024; "On the Efficacy of Eviction Policy for Key-Value Constrained Generative
// Language Model Inference", section 4.1 (LTAS).
//
// The lowest leaves first: last(attn)
#include <kvdsl/decode.hpp>
#include <kvdsl/prompt.hpp>

namespace {

struct TOVAPolicy : kvdsl::Policy {
  struct Column {
    enum {
      last_attn,  // last of attn
    };
  };
  static constexpr int columns = 1;
  struct Number {
    enum { capacity };
  };
  static constexpr int scratch_columns = 1;
  static constexpr kvdsl::Group group = kvdsl::Group::mean;
  static constexpr bool needs_attn = true;

  static void observe(const kvdsl::Query& row) {
    float* const last_attn = row.column(Column::last_attn);
#pragma omp simd
    for (int i = 0; i < row.slots; ++i) {
      const bool seen = row.visible(i);
      last_attn[i] = seen ? row.attn[i] : last_attn[i];
    }
  }

  static void settle(kvdsl::Head& head) {
    const int leaving = head.overflow(kvdsl::count(head.param(Number::capacity)));
    if (leaving == 0) return;
    const float* const last_attn = head.column(Column::last_attn);
    float* const score = head.scratch(0);
#pragma omp simd
    for (int i = 0; i < head.slots; ++i) {
      score[i] = last_attn[i];
    }
    head.evict(score, leaving);
  }
};

}  // namespace

extern "C" {
int KVDSL_ENTRY(decode_f32)(const kvdsl::DecodeArgs* args) { return kvdsl::decode<float, TOVAPolicy>(*args); }
int KVDSL_ENTRY(decode_bf16)(const kvdsl::DecodeArgs* args) { return kvdsl::decode<kvdsl::bf16, TOVAPolicy>(*args); }
int KVDSL_ENTRY(decode_f16)(const kvdsl::DecodeArgs* args) { return kvdsl::decode<kvdsl::f16, TOVAPolicy>(*args); }
int KVDSL_ENTRY(replace_f32)(const kvdsl::DecodeArgs* args, const int32_t* slots) {
  return kvdsl::replace<float, TOVAPolicy>(*args, slots);
}
int KVDSL_ENTRY(replace_bf16)(const kvdsl::DecodeArgs* args, const int32_t* slots) {
  return kvdsl::replace<kvdsl::bf16, TOVAPolicy>(*args, slots);
}
int KVDSL_ENTRY(replace_f16)(const kvdsl::DecodeArgs* args, const int32_t* slots) {
  return kvdsl::replace<kvdsl::f16, TOVAPolicy>(*args, slots);
}
int KVDSL_ENTRY(observe_f32)(const kvdsl::DecodeArgs* args, const kvdsl::PromptArgs* prompt) {
  return kvdsl::observe<float, TOVAPolicy>(*args, *prompt);
}
int KVDSL_ENTRY(observe_bf16)(const kvdsl::DecodeArgs* args, const kvdsl::PromptArgs* prompt) {
  return kvdsl::observe<kvdsl::bf16, TOVAPolicy>(*args, *prompt);
}
int KVDSL_ENTRY(observe_f16)(const kvdsl::DecodeArgs* args, const kvdsl::PromptArgs* prompt) {
  return kvdsl::observe<kvdsl::f16, TOVAPolicy>(*args, *prompt);
}
int KVDSL_ENTRY(settle)(const kvdsl::DecodeArgs* args, const float* attn) {
  return kvdsl::settle<TOVAPolicy>(*args, attn);
}
int KVDSL_ENTRY(abi)() { return KVDSL_ABI; }
}
