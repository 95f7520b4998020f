// How many tokens have left pages of vLLM's cache. kvdsl/integrations/vllm/page.py says how a page lies in memory.
#include <cstdint>

// pages [count]: where they begin. A page has how many tokens its request has seen, int32, at the byte `seen_at`, and at the byte
// `position_at` the place in the text of what each slot holds, int32 [heads, slots], below 0 where it holds nothing.
extern "C" void kvdsl_evicted(const char* const* pages, int64_t count, int64_t seen_at, int64_t position_at, int64_t heads,
                              int64_t slots, int64_t* evicted, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < count; ++i) {
    const int64_t seen = *reinterpret_cast<const int32_t*>(pages[i] + seen_at);
    const auto* position = reinterpret_cast<const int32_t*>(pages[i] + position_at);
    int64_t held = 0;
    for (int64_t slot = 0; slot < heads * slots; ++slot) held += position[slot] >= 0;
    evicted[i] = seen * heads - held;
  }
}
