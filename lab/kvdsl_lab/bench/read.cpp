// A streaming read of memory: what decode's rate is held against.
#include "bandwidth.hpp"  // of the driver

extern "C" int64_t kvdsl_read(const void* from, int64_t bytes, int threads) {
  return kvdsl::read_memory(from, bytes, threads);
}
