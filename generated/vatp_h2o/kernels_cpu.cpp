// VATP_H2O: one decode step on the CPU.
//
// Made by kvdsl 0.1.0 from vatp_h2o.kv (53b6ebffc25c). Do not edit: run `kvdsl compile vatp_h2o.kv`.
//
// H2O with the attention weighted by the norm of the value that it brings; the first tokens, whose values are small, stay.
//
// Guo et al., "Attention Score is Not All You Need for Token Importance Indicator in KV Cache Reduction: Value Also Matters",
// equations 2 and 4.
//
// The lowest leaves first: sum(attn) * sum(abs(v) over dims)
// keep last recent
// keep first sinks
#include <kvdsl/decode.hpp>
#include <kvdsl/prompt.hpp>

namespace {

struct VATP_H2OPolicy : kvdsl::Policy {
  struct Column {
    enum {
      norm1_v,  // token of sum(abs(v) over dims)
      sum_attn,  // sum of attn
    };
  };
  static constexpr int columns = 2;
  struct Number {
    enum { recent, sinks, capacity };
  };
  static constexpr int scratch_columns = 1;
  static constexpr kvdsl::Group group = kvdsl::Group::mean;
  static constexpr bool needs_attn = true;

  static void place(const kvdsl::Slot& slot) {
    slot.column(Column::norm1_v) = kvdsl::sum_over(slot.value_dim, [&](int d) { return std::fabs(slot.v[d]); });
  }

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
    const float* const norm1_v = head.column(Column::norm1_v);
    float* const score = head.scratch(0);
#pragma omp simd
    for (int i = 0; i < head.slots; ++i) {
      score[i] = sum_attn[i] * norm1_v[i];
    }
    head.protect_last(kvdsl::count(head.param(Number::recent)));
    head.protect_first(kvdsl::count(head.param(Number::sinks)));
    head.evict(score, leaving);
  }
};

}  // namespace

extern "C" {
int KVDSL_ENTRY(decode_f32)(const kvdsl::DecodeArgs* args) { return kvdsl::decode<float, VATP_H2OPolicy>(*args); }
int KVDSL_ENTRY(decode_bf16)(const kvdsl::DecodeArgs* args) { return kvdsl::decode<kvdsl::bf16, VATP_H2OPolicy>(*args); }
int KVDSL_ENTRY(decode_f16)(const kvdsl::DecodeArgs* args) { return kvdsl::decode<kvdsl::f16, VATP_H2OPolicy>(*args); }
int KVDSL_ENTRY(replace_f32)(const kvdsl::DecodeArgs* args, const int32_t* slots) {
  return kvdsl::replace<float, VATP_H2OPolicy>(*args, slots);
}
int KVDSL_ENTRY(replace_bf16)(const kvdsl::DecodeArgs* args, const int32_t* slots) {
  return kvdsl::replace<kvdsl::bf16, VATP_H2OPolicy>(*args, slots);
}
int KVDSL_ENTRY(replace_f16)(const kvdsl::DecodeArgs* args, const int32_t* slots) {
  return kvdsl::replace<kvdsl::f16, VATP_H2OPolicy>(*args, slots);
}
int KVDSL_ENTRY(observe_f32)(const kvdsl::DecodeArgs* args, const kvdsl::PromptArgs* prompt) {
  return kvdsl::observe<float, VATP_H2OPolicy>(*args, *prompt);
}
int KVDSL_ENTRY(observe_bf16)(const kvdsl::DecodeArgs* args, const kvdsl::PromptArgs* prompt) {
  return kvdsl::observe<kvdsl::bf16, VATP_H2OPolicy>(*args, *prompt);
}
int KVDSL_ENTRY(observe_f16)(const kvdsl::DecodeArgs* args, const kvdsl::PromptArgs* prompt) {
  return kvdsl::observe<kvdsl::f16, VATP_H2OPolicy>(*args, *prompt);
}
int KVDSL_ENTRY(settle)(const kvdsl::DecodeArgs* args, const float* attn) {
  return kvdsl::settle<VATP_H2OPolicy>(*args, attn);
}
int KVDSL_ENTRY(abi)() { return KVDSL_ABI; }
}
