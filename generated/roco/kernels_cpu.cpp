// RoCo: decode step on CPUs.
//
// Made by kvdsl 0.1.0 from roco.kv (5994bd044d6d). Do not edit: `kvdsl compile` rewrites it.
//
// Evicts the token with the lowest mean attention among those whose attention has settled; tokens whose attention varies most are kept.
//
// paper: "On the Efficacy of Eviction Policy for Key-Value Constrained Generative Language Model Inference", section 4.3:
//   mean attention score (MAS) and a scope by standard deviation
// year: 2024
// reach: exact
// checked: formula
// code: differs: squares underflow in float16, and scopes and budgets are others
//
// Evicts the lowest first: mean(attn)
// keep top protect by std(attn)
// keep last 1
#include <kvdsl/decode.hpp>
#include <kvdsl/prompt.hpp>

namespace {

struct RoCoPolicy : kvdsl::Policy {
  struct Column {
    enum {
      sum_attn,  // sum of attn
      sum_attn_squared,  // squares of attn
    };
  };
  static constexpr int columns = 2;
  struct Number {
    enum { protect, capacity };
  };
  static constexpr int scratch_columns = 2;
  static constexpr kvdsl::Group group = kvdsl::Group::mean;
  static constexpr bool needs_attn = true;

  static void observe(const kvdsl::Query& row) {
    float* const sum_attn = row.column(Column::sum_attn);
    float* const sum_attn_squared = row.column(Column::sum_attn_squared);
#pragma omp simd
    for (int i = 0; i < row.slots; ++i) {
      const bool seen = row.visible(i);
      sum_attn[i] += seen ? row.attn[i] : 0.0f;
      sum_attn_squared[i] += seen ? kvdsl::square(row.attn[i]) : 0.0f;
    }
  }

  static void settle(kvdsl::Head& head) {
    const int leaving = head.overflow(kvdsl::count(head.param(Number::capacity)));
    if (leaving == 0) return;
    const float* const sum_attn = head.column(Column::sum_attn);
    const float* const sum_attn_squared = head.column(Column::sum_attn_squared);
    float* const score = head.scratch(0);
    float* const top_1 = head.scratch(1);
#pragma omp simd
    for (int i = 0; i < head.slots; ++i) {
      score[i] = sum_attn[i] / head.observed(i);
      top_1[i] = std::sqrt(kvdsl::maximum(sum_attn_squared[i] / head.observed(i) - kvdsl::square(sum_attn[i] / head.observed(i)), 0.0f));
    }
    head.protect_top(top_1, kvdsl::count(head.param(Number::protect)));
    head.protect_last(1);
    head.evict(score, leaving, true);
  }
};

}  // namespace

extern "C" {
int KVDSL_ENTRY(decode_f32)(const kvdsl::DecodeArgs* args) { return kvdsl::decode<float, RoCoPolicy>(*args); }
int KVDSL_ENTRY(decode_bf16)(const kvdsl::DecodeArgs* args) { return kvdsl::decode<kvdsl::bf16, RoCoPolicy>(*args); }
int KVDSL_ENTRY(decode_f16)(const kvdsl::DecodeArgs* args) { return kvdsl::decode<kvdsl::f16, RoCoPolicy>(*args); }
int KVDSL_ENTRY(replace_f32)(const kvdsl::DecodeArgs* args, const int32_t* slots) {
  return kvdsl::replace<float, RoCoPolicy>(*args, slots);
}
int KVDSL_ENTRY(replace_bf16)(const kvdsl::DecodeArgs* args, const int32_t* slots) {
  return kvdsl::replace<kvdsl::bf16, RoCoPolicy>(*args, slots);
}
int KVDSL_ENTRY(replace_f16)(const kvdsl::DecodeArgs* args, const int32_t* slots) {
  return kvdsl::replace<kvdsl::f16, RoCoPolicy>(*args, slots);
}
int KVDSL_ENTRY(prefill_f32)(const kvdsl::DecodeArgs* args, const kvdsl::PromptArgs* prompt) {
  return kvdsl::prefill<float, RoCoPolicy>(*args, *prompt);
}
int KVDSL_ENTRY(prefill_bf16)(const kvdsl::DecodeArgs* args, const kvdsl::PromptArgs* prompt) {
  return kvdsl::prefill<kvdsl::bf16, RoCoPolicy>(*args, *prompt);
}
int KVDSL_ENTRY(prefill_f16)(const kvdsl::DecodeArgs* args, const kvdsl::PromptArgs* prompt) {
  return kvdsl::prefill<kvdsl::f16, RoCoPolicy>(*args, *prompt);
}
int KVDSL_ENTRY(settle)(const kvdsl::DecodeArgs* args, const float* attn) {
  return kvdsl::settle<RoCoPolicy>(*args, attn);
}
}
