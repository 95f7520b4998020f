// EQUIPBlocks: decode step on CPUs.
//
// Made by kvdsl 0.1.0 from equip_blocks.kv (3b7000443c68). Do not edit: `kvdsl compile` rewrites it.
//
// EQUIP_H2O as its paper has it in memory. Edition 1 states it: the two last lines are the defaults of the options of its caches.
//
// "EQUIP: EQUivariant preserving In-Place updates for Efficient Token Pruning", section 4.3 and figure 18: rotated halves
// are kept, and a new token is written at block and offset.
//
// Evicts the lowest first: sum(attn)
// keep last recent
#include <kvdsl/decode.hpp>
#include <kvdsl/prompt.hpp>

namespace {

struct EQUIPBlocksPolicy : kvdsl::Policy {
  struct Column {
    enum {
      sum_attn,  // sum of attn
    };
  };
  static constexpr int columns = 1;
  struct Number {
    enum { recent, capacity, block };
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
int KVDSL_ENTRY(decode_f32)(const kvdsl::DecodeArgs* args) { return kvdsl::decode<float, EQUIPBlocksPolicy>(*args); }
int KVDSL_ENTRY(decode_bf16)(const kvdsl::DecodeArgs* args) { return kvdsl::decode<kvdsl::bf16, EQUIPBlocksPolicy>(*args); }
int KVDSL_ENTRY(decode_f16)(const kvdsl::DecodeArgs* args) { return kvdsl::decode<kvdsl::f16, EQUIPBlocksPolicy>(*args); }
int KVDSL_ENTRY(replace_f32)(const kvdsl::DecodeArgs* args, const int32_t* slots) {
  return kvdsl::replace<float, EQUIPBlocksPolicy>(*args, slots);
}
int KVDSL_ENTRY(replace_bf16)(const kvdsl::DecodeArgs* args, const int32_t* slots) {
  return kvdsl::replace<kvdsl::bf16, EQUIPBlocksPolicy>(*args, slots);
}
int KVDSL_ENTRY(replace_f16)(const kvdsl::DecodeArgs* args, const int32_t* slots) {
  return kvdsl::replace<kvdsl::f16, EQUIPBlocksPolicy>(*args, slots);
}
int KVDSL_ENTRY(prefill_f32)(const kvdsl::DecodeArgs* args, const kvdsl::PromptArgs* prompt) {
  return kvdsl::prefill<float, EQUIPBlocksPolicy>(*args, *prompt);
}
int KVDSL_ENTRY(prefill_bf16)(const kvdsl::DecodeArgs* args, const kvdsl::PromptArgs* prompt) {
  return kvdsl::prefill<kvdsl::bf16, EQUIPBlocksPolicy>(*args, *prompt);
}
int KVDSL_ENTRY(prefill_f16)(const kvdsl::DecodeArgs* args, const kvdsl::PromptArgs* prompt) {
  return kvdsl::prefill<kvdsl::f16, EQUIPBlocksPolicy>(*args, *prompt);
}
int KVDSL_ENTRY(settle)(const kvdsl::DecodeArgs* args, const float* attn) {
  return kvdsl::settle<EQUIPBlocksPolicy>(*args, attn);
}
}
