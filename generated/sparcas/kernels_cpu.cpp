// SparCas: decode step on CPUs.
//
// Made by kvdsl 0.1.0 from sparcas.kv (7aefa5e84f82). Do not edit: `kvdsl compile` rewrites it.
//
// Keeps every token and attends to few: those with the best scores over the dims in which the query is large.
//
// The first two layers attend to everything (section 4.1). The newest token has to compete.
//
// paper: "SparCas: A Dimension-First Cascade for Efficient Long-Context LLM Inference", algorithm 1 and equations 3 and 4
// year: 2025
// reach: exact
// checked: formula
// code: none released
#include <kvdsl/decode.hpp>
#include <kvdsl/prompt.hpp>

namespace {

struct SparCasPolicy : kvdsl::Policy {
  struct Number {
    enum { select, sketch_dims, sketch_every };
  };
  static constexpr kvdsl::Group group = kvdsl::Group::mean;

  // Attends to the highest: sum(q * k over sketch)
  static constexpr kvdsl::By by = kvdsl::By::sketch_dot;
  static int tokens(const kvdsl::Slots& row) { return kvdsl::count(row.param(Number::select)); }

  // Reads the highest dims: abs(q)
  static int sketch_every(const kvdsl::Slots& row) { return kvdsl::count(row.param(Number::sketch_every)); }

  template <class T>
  static void sketch(const kvdsl::QueryOf<T>& row, float* by) {
    for (int d = 0; d < row.key_dim; ++d) by[d] = kvdsl::over_group<group>(row.group, [&](int g) { return std::fabs(row.q(g, d)); });
  }
};

}  // namespace

extern "C" {
int KVDSL_ENTRY(decode_f32)(const kvdsl::DecodeArgs* args) { return kvdsl::decode<float, SparCasPolicy>(*args); }
int KVDSL_ENTRY(decode_bf16)(const kvdsl::DecodeArgs* args) { return kvdsl::decode<kvdsl::bf16, SparCasPolicy>(*args); }
int KVDSL_ENTRY(decode_f16)(const kvdsl::DecodeArgs* args) { return kvdsl::decode<kvdsl::f16, SparCasPolicy>(*args); }
int KVDSL_ENTRY(replace_f32)(const kvdsl::DecodeArgs* args, const int32_t* slots) {
  return kvdsl::replace<float, SparCasPolicy>(*args, slots);
}
int KVDSL_ENTRY(replace_bf16)(const kvdsl::DecodeArgs* args, const int32_t* slots) {
  return kvdsl::replace<kvdsl::bf16, SparCasPolicy>(*args, slots);
}
int KVDSL_ENTRY(replace_f16)(const kvdsl::DecodeArgs* args, const int32_t* slots) {
  return kvdsl::replace<kvdsl::f16, SparCasPolicy>(*args, slots);
}
int KVDSL_ENTRY(prefill_f32)(const kvdsl::DecodeArgs* args, const kvdsl::PromptArgs* prompt) {
  return kvdsl::prefill<float, SparCasPolicy>(*args, *prompt);
}
int KVDSL_ENTRY(prefill_bf16)(const kvdsl::DecodeArgs* args, const kvdsl::PromptArgs* prompt) {
  return kvdsl::prefill<kvdsl::bf16, SparCasPolicy>(*args, *prompt);
}
int KVDSL_ENTRY(prefill_f16)(const kvdsl::DecodeArgs* args, const kvdsl::PromptArgs* prompt) {
  return kvdsl::prefill<kvdsl::f16, SparCasPolicy>(*args, *prompt);
}
}
