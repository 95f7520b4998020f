// Measures memory read bandwidth: the roofline of decode.
#pragma once

#include <cstdint>
#include <omp.h>

#include "attend.hpp"
#include "simd.hpp"

namespace kvdsl {

// Reads `bytes` from memory once, a contiguous share per thread, with the kernels' prefetching. Returns a checksum, so
// that no load is optimized away.
inline int64_t read_memory(const void* from, int64_t bytes, int threads) {
  constexpr int in_flight = 8;
  constexpr int64_t step = in_flight * static_cast<int64_t>(sizeof(Ints));
  const int64_t steps = bytes / step;
  int64_t checksum = 0;
#pragma omp parallel num_threads(threads > 0 ? threads : 1) reduction(+ : checksum)
  {
    const int64_t team = omp_get_num_threads(), self = omp_get_thread_num();
    const char* const end = static_cast<const char*>(from) + steps * (self + 1) / team * step;
    Bits sums[in_flight] = {};
    for (const char* at = static_cast<const char*>(from) + steps * self / team * step; at < end; at += step) {
      for (int i = 0; i < in_flight; ++i) {
        __builtin_prefetch(at + i * sizeof(Bits) + ahead);
        sums[i] += load_as<Bits>(at + i * sizeof(Bits));
      }
    }
    for (const Bits& vector : sums) {
      for (int i = 0; i < width; ++i) checksum += vector[i];
    }
  }
  return checksum;
}

}  // namespace kvdsl
