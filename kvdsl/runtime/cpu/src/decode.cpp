// Driver: a decode step of a policy for every row of the batch and every KV head.
//
// A unit is one KV head of one row (unit.hpp). While there are enough units for all threads, each thread takes one at a
// time. All threads share the remaining ones, chunk by chunk.
#include <kvdsl/decode.hpp>

#include <cstdint>
#include <new>
#include <omp.h>

#include "arena.hpp"
#include "laps.hpp"
#include "slots.hpp"
#include "unit.hpp"
#include "workspace.hpp"

namespace kvdsl {

namespace {

// Runs a unit on one thread.
int decode_alone(const DecodeArgs& args, const Steps& steps, int number, int64_t workspace) {
  char* const memory = thread_buffer().reserve(workspace);
  if (!memory) return out_of_memory;
  Unit unit(args, steps, number, memory);
  Laps laps(args);
  for (int t = 0; t < args.tokens; ++t) {
    if (unit.place(t)) {
      laps.end(Stage::place);
      if (unit.renewing()) {
        for (int c = 0; c < unit.chunks(); ++c) unit.renew(c);
        laps.end(Stage::renew);
      }
      if (unit.choosing()) {
        for (int c = 0; c < unit.chunks(); ++c) unit.look(c);
        laps.end(Stage::look);
        unit.choose();
        laps.end(Stage::choose);
      }
      for (int c = 0; c < unit.row_chunks(); ++c) unit.score(c);
      for (int c = 0; c < unit.row_chunks(); ++c) unit.weigh(c);
      laps.end(Stage::attend);
    }
    unit.finish(t);
    laps.end(Stage::finish);
  }
  return unit.status();
}

// Calls body(unit, chunk) for every chunk of a few units, divided over the team's threads.
template <class Body>
void share(Unit* units, int count, int chunks, Body&& body) {
#pragma omp for schedule(static)
  for (int i = 0; i < count * chunks; ++i) body(units[i / chunks], i % chunks);
}

// Runs a few units on the whole team; every thread calls this.
void decode_together(const DecodeArgs& args, const Steps& steps, Unit* units, int count) {
  const int chunks = units[0].chunks();
  Laps laps(args);
  for (int t = 0; t < args.tokens; ++t) {
    share(units, count, 1, [=](Unit& unit, int) { unit.place(t); });
    laps.end(Stage::place);
    if (steps.selecting.selects()) {
      share(units, count, chunks, [](Unit& unit, int c) { if (unit.renewing()) unit.renew(c); });
      laps.end(Stage::renew);
      share(units, count, chunks, [](Unit& unit, int c) { if (unit.choosing()) unit.look(c); });
      laps.end(Stage::look);
      if (steps.selecting.vote != Vote::none) {
        share(units, count, 1, [](Unit& unit, int) { if (unit.voting()) unit.ask(); });
        share(units, count, 1, [=](Unit& unit, int) { if (unit.choosing()) unit.hear(units); });
      }
      share(units, count, 1, [](Unit& unit, int) { if (unit.choosing()) unit.choose(); });
      laps.end(Stage::choose);
    }
    share(units, count, chunks, [](Unit& unit, int c) { if (unit.placed() && c < unit.row_chunks()) unit.score(c); });
    share(units, count, chunks, [](Unit& unit, int c) { if (unit.placed() && c < unit.row_chunks()) unit.weigh(c); });
    laps.end(Stage::attend);
    share(units, count, 1, [=](Unit& unit, int) { unit.finish(t); });
    laps.end(Stage::finish);
  }
}

// Counts the row's new tokens without padding.
int real_tokens(const DecodeArgs& args, int64_t row) {
  if (!args.real) return args.tokens;
  int tokens = 0;
  for (int t = 0; t < args.tokens; ++t) tokens += args.real[row * args.tokens + t] != 0;
  return tokens;
}

// Adds the real tokens to `seen`.
void advance(const DecodeArgs& args) {
  for (int64_t b = 0; b < args.batch; ++b) args.seen[b] += real_tokens(args, b);
}

// Whether these are distinct live slots. Marks visited slots meanwhile.
bool all_live(int32_t* position, int slots, const int32_t* named, int count) {
  int n = 0;
  while (n < count && named[n] >= 0 && named[n] < slots && position[named[n]] >= 0) {
    position[named[n]] = ~position[named[n]];
    ++n;
  }
  for (int i = 0; i < n; ++i) position[named[i]] = ~position[named[i]];
  return n == count;
}

// Bytes of a layer's keys and values beyond which nothing written is still in a core's cache when a query attends.
constexpr int64_t cached_bytes = int64_t{8} << 20;

}  // namespace

int decode(const DecodeArgs& args, const Steps& steps) {
  const int units = args.batch * args.kv_heads;
  const int threads = args.threads > 1 ? args.threads : 1;
  const bool vote = steps.selecting.vote != Vote::none;  // then every head waits for the others
  const int alone = vote ? 0 : units / threads * threads, together = units - alone;
  const int64_t workspace = Workspace::bytes(args, steps);
  int status = ok;

  Unit* shared = nullptr;
  if (together > 0) {
    static thread_local Buffer buffer;
    Arena arena(buffer.reserve(together * (workspace + round_up(sizeof(Unit), 64))));
    shared = arena.take<Unit>(together);
    if (!shared) return out_of_memory;
    for (int u = 0; u < together; ++u) new (shared + u) Unit(args, steps, alone + u, arena.take<char>(workspace));
  }
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : status)
  {
#pragma omp for schedule(dynamic, 1) nowait
    for (int u = 0; u < alone; ++u) status |= decode_alone(args, steps, u, workspace);
    if (together > 0) decode_together(args, steps, shared, together);
  }
  for (int u = 0; u < together; ++u) status |= shared[u].status();
  give_blocks_back(args);
  if (args.copied) {
    for (int b = 0; b < args.batch; ++b) args.copied[b] |= real_tokens(args, b) > 0;
  }
  advance(args);
  return status;
}

// Replaces the tokens in the given slots, [batch, kv_heads, tokens], by new ones; no query attends. Changes nothing if
// a slot is free or occurs twice.
int replace(const DecodeArgs& args, const int32_t* slots, const Steps& steps) {
  const int units = args.batch * args.kv_heads;
  const int64_t workspace = Workspace::bytes(args, steps);
  const int threads = args.threads > 1 ? args.threads : 1;
  const bool past_caches = steps.dtype->size * (args.key_dim + args.value_dim) * int64_t{args.slots} * units > cached_bytes;
  int status = ok;
#pragma omp parallel for num_threads(threads) reduction(| : status)
  for (int64_t u = 0; u < units; ++u) {
    if (!all_live(args.position + u * args.slots, args.slots, slots + u * args.tokens, args.tokens)) status |= not_live;
  }
  if (status) return status;
#pragma omp parallel for num_threads(threads) reduction(| : status)
  for (int u = 0; u < units; ++u) {
    char* const memory = thread_buffer().reserve(workspace);
    if (memory) Unit(args, steps, u, memory).replace(slots + int64_t{u} * args.tokens, past_caches);
    else status |= out_of_memory;
  }
  advance(args);
  return status;
}

int settle(const DecodeArgs& args, const float* attn, const Steps& steps) {
  const int units = args.batch * args.kv_heads;
  const int64_t workspace = Workspace::bytes(args, steps);
  int status = ok;
#pragma omp parallel for num_threads(args.threads > 1 ? args.threads : 1) reduction(| : status)
  for (int u = 0; u < units; ++u) {
    char* const memory = thread_buffer().reserve(workspace);
    if (memory) Unit(args, steps, u, memory).settle_given(attn ? attn + int64_t{u} * args.slots : nullptr);
    else status |= out_of_memory;
  }
  give_blocks_back(args);
  return status;
}

}  // namespace kvdsl
