// One decoded token behind the prompt of each of several requests. The token attends to the prompt, whose blocks
// requests may share, and takes the policy's step over the answer's slots. There the prompt acts as a sink: its
// log-sum-exp joins the softmax denominator, so the policy observes true probabilities, and the prompt's part is added
// to the output.
#include <kvdsl/args.hpp>
#include <kvdsl/dtype.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "prompt_blocks.hpp"

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

// Attention to the prompts: log-sum-exps, [count, Hq], and outputs, [count, Hq, stride].
struct Found {
  std::vector<float> lse, out;
  int64_t stride;
};

// Query heads that are read together at most.
constexpr int widest = 64;

const int32_t* row_of(const Answers& a, int i) { return a.table + a.request[i] * a.table_stride; }

// Tokens whose prompts begin with the same blocks, which are read once for all of them.
struct Together {
  std::vector<int> tokens;
  int common;  // tokens in these blocks, in whole chunks
};

// Returns how many tokens of whole chunks lie in the same blocks for both.
int common_tokens(const Answers& a, int one, int other) {
  const int32_t* const first = row_of(a, one);
  const int32_t* const end = first + std::min(a.prompt[one], a.prompt[other]) / a.block_size;
  const int64_t same = std::mismatch(first, end, row_of(a, other)).first - first;
  return static_cast<int>(same * a.block_size / chunk * chunk);
}

// Sorts tokens by their prompts' whole blocks, so that those that share most are neighbours. There are enough sets for
// all threads.
std::vector<Together> sets_of(const Answers& a) {
  const int shares = a.count * a.plan->kv_heads / (2 * std::max(a.threads, 1));
  const std::size_t most = std::clamp(shares, 1, std::max(widest / a.plan->group, 1));
  std::vector<int> order(a.count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int i, int j) {
    const int64_t own = a.prompt[i] / a.block_size, other = a.prompt[j] / a.block_size;
    const int found = std::memcmp(row_of(a, i), row_of(a, j), sizeof(int32_t) * std::min(own, other));
    return found != 0 ? found < 0 : own < other;
  });
  std::vector<Together> sets;
  for (const int i : order) {
    const int same = sets.empty() ? 0 : std::min(common_tokens(a, sets.back().tokens[0], i), sets.back().common);
    if (same > 0 && 2 * same >= sets.back().common && sets.back().tokens.size() < most) {
      sets.back().tokens.push_back(i), sets.back().common = same;
    } else {
      sets.push_back({{i}, static_cast<int>(a.prompt[i] / chunk * chunk)});
    }
  }
  return sets;
}

struct Work {
  PromptReader reader;
  std::vector<const char*> queries;
  std::vector<float> sinks;
  std::vector<int64_t> table;
};

// Attends to the prompts for the query heads of KV head h of tokens that share blocks.
void attend_to_prompts(const Answers& a, const Together& set, int h, Found& found, Work& w) {
  const DecodeArgs& p = *a.plan;
  const Dtype& type = dtype_of(a.dtype);
  const int group = p.group;
  const int64_t row_bytes = int64_t{p.key_dim} * type.size;
  w.queries.clear(), w.sinks.clear();
  for (const int i : set.tokens) {
    for (int g = 0; g < group; ++g) {
      w.queries.push_back(a.query + a.row[i] * a.query_stride + (h * group + g) * row_bytes);
      w.sinks.push_back(a.sinks ? a.sinks[h * group + g] : -INFINITY);
    }
  }
  w.reader.start(p, type, a.block_size, w.queries.data(), w.sinks.data(), static_cast<int>(w.queries.size()));
  const auto prompt_of = [&](int i) {
    return PromptBlocks{a.blocks + h * a.head_bytes, row_of(a, i), a.block_bytes, a.head_bytes / 2, row_bytes, a.block_size};
  };
  w.reader.read(prompt_of(set.tokens[0]), 0, set.common, 0, static_cast<int>(w.queries.size()));
  int first = 0;
  for (const int i : set.tokens) {
    w.reader.read(prompt_of(i), set.common, static_cast<int>(a.prompt[i]), first, group);
    const int64_t heads = (int64_t{i} * p.kv_heads + h) * group;
    for (int g = 0; g < group; ++g) found.lse[heads + g] = w.reader.finish(first + g, found.out.data() + (heads + g) * found.stride);
    first += group;
  }
}

int step(const Answers& a, int i, const Found& found, Work& w) {
  const int64_t row = a.row[i], heads = int64_t{i} * a.plan->kv_heads * a.plan->group;
  const int prompt = static_cast<int>(a.prompt[i]);
  const int32_t* const behind = row_of(a, i) + (prompt + a.block_size - 1) / a.block_size;
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
  Found found{std::vector<float>(queries), {}, (p.key_dim + pair - 1) / pair * pair};
  found.out.resize(queries * found.stride);
  const std::vector<Together> sets = sets_of(*a);
  const int units = static_cast<int>(sets.size()) * p.kv_heads;
  int status = ok;
#pragma omp parallel num_threads(a->threads) reduction(| : status) if (a->threads > 1)
  {
    static thread_local Work work;
#pragma omp for schedule(dynamic, 1)
    for (int unit = 0; unit < units; ++unit) attend_to_prompts(*a, sets[unit / p.kv_heads], unit % p.kv_heads, found, work);
#pragma omp for schedule(dynamic, 1)
    for (int i = 0; i < a->count; ++i) status |= step(*a, i, found, work);
  }
  return status;
}
