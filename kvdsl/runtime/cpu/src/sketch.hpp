// The sketch: a few dims of a head's keys, stored beside them, by which a query ranks all tokens while reading a
// fraction of the bytes (SparCas, algorithm 1: K_compact).
//
// It is stored in tiles of `block` slots, [width of the sketch, block]: for each dim, the tile's slots contiguously. So
// products need no sum across lanes, and memory is read in order. Inside a pair, slots are in the order of load_pair().
#pragma once

#include <cstdint>

#include <kvdsl/grade.hpp>
#include <kvdsl/view.hpp>

#include "attend.hpp"
#include "simd.hpp"

namespace kvdsl {

// Returns where slot r of a tile lies in a dim's row: the inverse of place_of().
template <class T>
constexpr int lane_of(int r) {
  if (!std::is_same_v<T, bf16>) return r;
  return r / pair * pair + (r % pair < width ? 2 * (r % pair) : 2 * (r % pair - width) + 1);
}

// Writes a key to place r of a tile.
template <class T>
void put_in_tile(const void* key, const int32_t* dims, int count, int r, void* tile) {
  const T* const from = static_cast<const T*>(key);
  T* const to = static_cast<T*>(tile) + lane_of<T>(r);
  for (int j = 0; j < count; ++j) to[j * block] = from[dims[j]];
}

// Writes contiguous keys to places first .. end of a tile.
template <class T>
void fill_tile(const void* keys, int dim, int first, int end, const int32_t* dims, int count, void* tile) {
  constexpr int ahead_rows = 16;
  const T* row = static_cast<const T*>(keys);
  for (int r = first; r < end; ++r, row += dim) {
    for (int d = 0; d < dim; d += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(row + ahead_rows * dim + d);
    put_in_tile<T>(row, dims, count, r, tile);
  }
}

// scores[h][r] = partial product of query h, [count] in the sketch's order, with place r of a tile.
template <class T>
void dot_tile(const void* tile, const float* q, int64_t q_stride, int heads, int count, float* scores) {
  constexpr int pairs = block / pair;
  const T* const from = static_cast<const T*>(tile);
  for (int h = 0; h < heads; ++h) {
    Pair sum[pairs] = {};
    for (int j = 0; j < count; ++j) {
      const Floats x = splat(q[h * q_stride + j]);
      for (int p = 0; p < pairs; ++p) {
        const Pair k = load_pair(from + j * block + p * pair);
        sum[p].a += x * k.a;
        sum[p].b += x * k.b;
      }
    }
    for (int p = 0; p < pairs; ++p) {
      store(scores + h * block + p * pair, sum[p].a);
      store(scores + h * block + p * pair + width, sum[p].b);
    }
  }
}

// Writes the `count` highest dims, ascending, lower ones first among equals; pads with -1 up to `width`.
inline void find_dims(const float* by, int dim, int count, int width_of_sketch, int32_t* dims) {
  int found = 0;
  for (int d = 0; d < dim; ++d) {
    const Grade own = grade(by[d]);
    int before = 0;
#pragma omp simd reduction(+ : before)
    for (int e = 0; e < dim; ++e) {
      const Grade other = grade(by[e]);
      before += (other > own) | ((other == own) & (e < d));
    }
    if (before < count && found < width_of_sketch) dims[found++] = d;
  }
  for (; found < width_of_sketch; ++found) dims[found] = -1;
}

}  // namespace kvdsl
