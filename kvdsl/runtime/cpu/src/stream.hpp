// Copies that bypass the core's caches: the destination is not read first, and nothing is evicted.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvdsl {

// Streams whole cache lines; the rest, or without such stores, by an ordinary copy.
inline void stream(char* to, const char* from, int64_t bytes) {
#if defined(__SSE2__)
  if ((reinterpret_cast<std::uintptr_t>(to) | static_cast<std::uintptr_t>(bytes)) % 64 == 0) {
    for (int64_t i = 0; i < bytes; i += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    }
    return;
  }
#endif
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

// Call before another thread reads what was streamed.
inline void end_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace kvdsl
