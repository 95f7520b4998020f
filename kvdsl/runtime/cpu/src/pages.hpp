// Pages: tokens that lie together in the text. Of every page the smallest and the largest key are kept, dim by dim, from
// which a query finds at most how well a key in it can match (Quest). A policy with pages evicts nothing (the compiler sees
// to that), so the token at position p is in slot p, and what a page holds only ever grows.
#pragma once

#include <cstdint>

#include "attend.hpp"
#include "simd.hpp"

namespace kvdsl {

// The bounds of a page, [2, dim]: the smallest, then the largest; after its first key, or one more.
template <class T>
void bound_key(const void* key, int dim, bool first, void* bounds) {
  const T* const from = static_cast<const T*>(key);
  T* const low = static_cast<T*>(bounds);
  T* const high = low + dim;
  if (first) {
    std::memcpy(low, from, sizeof(T) * static_cast<std::size_t>(dim));
    std::memcpy(high, from, sizeof(T) * static_cast<std::size_t>(dim));
    return;
  }
  for (int d = 0; d < dim; ++d) {
    const float x = to_float(from[d]);
    low[d] = from_float<T>(minimum(to_float(low[d]), x));
    high[d] = from_float<T>(maximum(to_float(high[d]), x));
  }
}

inline Floats larger(Floats a, Floats b) {
  const Floats top = a > b ? a : b;
  return a != a ? a : top;
}

// scores[g * stride] = the sum over dims of max(q * low, q * high); queries and bounds in pairs.
template <class T>
void bound_scores(const void* bounds, int dim, const float* q, int64_t q_stride, int group, float* scores, int64_t stride) {
  const T* const low = static_cast<const T*>(bounds);
  const T* const high = low + dim;
  for (int g = 0; g < group; ++g) {
    Floats sum_a{}, sum_b{};
    for (int d = 0; d < dim; d += pair) {
      const Pair least = load_pair(low + d, dim - d), most = load_pair(high + d, dim - d);
      const Floats a = load(q + g * q_stride + d), b = load(q + g * q_stride + d + width);
      sum_a += larger(a * least.a, a * most.a);
      sum_b += larger(b * least.b, b * most.b);
    }
    scores[g * stride] = sum(sum_a + sum_b);
  }
}

}  // namespace kvdsl
