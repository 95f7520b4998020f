// One decoded token behind the prompt of each of several requests. The token attends to the prompt, whose blocks
// requests may share, and takes the policy's step over the answer's slots. There the prompt acts as a sink: its
// log-sum-exp joins the softmax denominator, so the policy observes true probabilities, and the prompt's part is added
// to the output.
#include <kvdsl/args.hpp>
#include <kvdsl/dtype.hpp>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attend.hpp"

using namespace kvdsl;

// Mirrored in answers.py. A block holds for each KV head its keys, then its values. A request's row of the table lists
// the blocks of its prompt, the block of its answer's state, and the blocks of its answer.
struct Answers {
  int (*decode)(const DecodeArgs*);
  const DecodeArgs* plan;  // the arguments that all requests share
  char* blocks;            // the layer's
  const int32_t* table;    // [requests, table_stride]
  const int64_t* row;      // [count] the token's row in the vectors below
  const int64_t* request;  // [count] the request's row of the table
  const int64_t* place;    // [count] the token's position in the text
  const int64_t* prompt;   // [count] tokens in the prompt
  const float* sinks;      // [Hq] or null: learned logits that join the prompt's sums
  const float* supplied;   // [count, supplied_stride] or null: the tokens' values from their requests
  const char *query, *key, *value;
  char* out;
  int64_t query_stride, key_stride, value_stride, out_stride;  // bytes from token to token
  int64_t table_stride, block_bytes, head_bytes, supplied_stride;
  int64_t position_at, state_at, seen_at;  // bytes into the block of the answer's state
  int32_t count, block_size, dtype, threads;
};

namespace {

const Dtype& dtype_of(int code) { return code == 0 ? float32 : code == 1 ? bfloat16 : float16; }

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Attention to the prompts: log-sum-exps, [count, Hq], and outputs, [count, Hq, stride].
struct Found {
  std::vector<float> lse, out;
  int64_t stride;
};

struct Work {
  std::vector<float> query, plain, scores, tops, totals;
  std::vector<char> zeros;
  std::vector<int64_t> table;
};

// Attends to the prompt for the query heads of KV head h of token i.
void attend_to_prompt(const Answers& a, int i, int h, Found& found, Work& w) {
  const DecodeArgs& p = *a.plan;
  const Dtype& type = dtype_of(a.dtype);
  const int dim = p.key_dim, group = p.group, prompt = static_cast<int>(a.prompt[i]);
  const int64_t row_bytes = int64_t{dim} * type.size, stride = found.stride, n = up(prompt, block), line = n + width;
  const int64_t heads = (int64_t{i} * p.kv_heads + h) * group;
  const int32_t* const table = a.table + a.request[i] * a.table_stride;
  char* const base = a.blocks + h * a.head_bytes;
  w.query.resize(group * stride), w.plain.resize(dim), w.scores.resize(group * line);
  w.zeros.assign(row_bytes, 0), w.tops.resize(group);
  for (int g = 0; g < group; ++g) w.tops[g] = a.sinks ? a.sinks[h * group + g] : -INFINITY;
  const void* rows[block];
  int32_t visible[block];
  const auto find = [&](int from, int64_t offset) {
    for (int r = 0; r < block; ++r) {
      const int at = from + r;
      visible[r] = -static_cast<int32_t>(at < prompt);
      rows[r] = at < prompt ? base + table[at / a.block_size] * a.block_bytes + offset + (at % a.block_size) * row_bytes : w.zeros.data();
    }
  };
  const char* const query = a.query + a.row[i] * a.query_stride + h * group * row_bytes;
  for (int g = 0; g < group; ++g) type.read(query + g * row_bytes, dim, w.plain.data(), w.query.data() + g * stride);
  for (int from = 0; from < n; from += block) {
    find(from, 0);
    type.dot(w.query.data(), stride, group, rows, nullptr, dim, w.scores.data() + from, line);
    for (int g = 0; g < group; ++g) {
      w.tops[g] = finish_scores(w.scores.data() + g * line + from, visible, p.scale, p.softcap, 0.0f, nullptr, w.tops[g]);
    }
  }
  float* const out = found.out.data() + heads * stride;
  std::fill_n(out, group * stride, 0.0f);
  for (int g = 0; g < group; ++g) {
    float total = exponentiate(w.scores.data() + g * line, static_cast<int>(n), w.tops[g]);
    if (a.sinks) total += std::exp(a.sinks[h * group + g] - w.tops[g]);
    found.lse[heads + g] = w.tops[g] + std::log(total);
    for (int64_t at = 0; at < n; ++at) w.scores[g * line + at] /= total;
  }
  for (int from = 0; from < n; from += block) {
    find(from, a.head_bytes / 2);
    type.add(w.scores.data() + from, line, group, rows, nullptr, dim, out, stride);
  }
}

int step(const Answers& a, int i, const Found& found, Work& w) {
  const int64_t row = a.row[i], heads = int64_t{i} * a.plan->kv_heads * a.plan->group;
  const int prompt = static_cast<int>(a.prompt[i]);
  const int32_t* const behind = a.table + a.request[i] * a.table_stride + (prompt + a.block_size - 1) / a.block_size;
  char* const state = a.blocks + behind[0] * a.block_bytes;
  DecodeArgs args = *a.plan;
  args.position = reinterpret_cast<int32_t*>(state + a.position_at);
  args.state = reinterpret_cast<float*>(state + a.state_at);
  args.seen = reinterpret_cast<int32_t*>(state + a.seen_at);
  if (a.place[i] == prompt) {  // the answer begins: clear what an earlier request left
    std::fill_n(args.position, int64_t{args.kv_heads} * args.slots, -1);
    *args.seen = prompt;
  }
  if (*args.seen != a.place[i]) return not_live;
  w.table.assign(behind + 1, behind + 1 + (args.slots + a.block_size - 1) / a.block_size);
  args.table = w.table.data();
  args.query = a.query + row * a.query_stride;
  args.key = a.key + row * a.key_stride;
  args.value = a.value + row * a.value_stride;
  args.out = a.out + row * a.out_stride;
  args.supplied = a.supplied ? a.supplied + i * a.supplied_stride : nullptr;
  args.sinks = found.lse.data() + heads;
  args.beside = found.out.data() + heads * found.stride;
  return a.decode(&args);
}

}  // namespace

extern "C" int kvdsl_answer(const Answers* a) {
  const DecodeArgs& p = *a->plan;
  const int64_t queries = int64_t{a->count} * p.kv_heads * p.group;
  Found found{std::vector<float>(queries), {}, up(p.key_dim, pair)};
  found.out.resize(queries * found.stride);
  int status = ok;
#pragma omp parallel num_threads(a->threads) reduction(| : status) if (a->threads > 1)
  {
    static thread_local Work work;
#pragma omp for schedule(dynamic, 1)
    for (int unit = 0; unit < a->count * p.kv_heads; ++unit) attend_to_prompt(*a, unit / p.kv_heads, unit % p.kv_heads, found, work);
#pragma omp for schedule(dynamic, 1)
    for (int i = 0; i < a->count; ++i) status |= step(*a, i, found, work);
  }
  return status;
}
