// Pages: ranges of the text. For every page the smallest and largest key are stored, dim by dim; from them a query
// computes an upper bound of its product with any key in the page (Quest). The compiler ensures that a policy with
// pages never evicts, so the token at position p is in slot p and pages only grow.
#pragma once

#include <cstdint>

#include "attend.hpp"
#include "simd.hpp"

namespace kvdsl {

// Updates the bounds of a page, [2, dim] (smallest, largest), by its first or another key.
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

// scores[g * stride] = sum over dims of max(q * low, q * high); queries and bounds in pairs.
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
