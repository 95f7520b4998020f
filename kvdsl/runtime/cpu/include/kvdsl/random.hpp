// random(): counter-based, so that all backends draw the same number for (seed, layer, head, position, step).
#pragma once

#include <cstdint>

namespace kvdsl {

// murmur3's finalizer.
inline uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x85EBCA6Bu;
  x ^= x >> 13;
  x *= 0xC2B2AE35u;
  x ^= x >> 16;
  return x;
}

inline uint32_t absorb(uint32_t hash, int32_t word) { return mix(hash ^ (static_cast<uint32_t>(word) * 0x9E3779B9u)); }

// Maps 24 bits to [0, 1), exactly.
inline float to_unit(uint32_t hash) { return static_cast<float>(static_cast<int32_t>(hash >> 8)) * 0x1p-24f; }

}  // namespace kvdsl
