// Operations on a model dtype as function pointers, so that the driver is compiled once for all dtypes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "types.hpp"

namespace kvdsl {

struct Next;
struct Rope;

// Operations on a sketch's tiles, see src/sketch.hpp.
struct Tiles {
  void (*put)(const void* key, const int32_t* dims, int count, int r, void* tile);
  void (*fill)(const void* keys, int dim, int first, int end, const int32_t* dims, int count, void* tile);
  void (*dot)(const void* tile, const float* q, int64_t q_stride, int heads, int count, float* scores);
};

// Operations on bounds of pages, see src/pages.hpp.
struct Bounds {
  void (*add)(const void* key, int dim, bool first, void* bounds);
  void (*score)(const void* bounds, int dim, const float* q, int64_t q_stride, int group, float* scores, int64_t stride);
};

struct Dtype {
  int size;
  // scores[g][r] = q[g] . rows[r] for a block of rows and all heads of the group. `next`: rows to prefetch, or null.
  void (*dot)(const float* q, int64_t q_stride, int group, const void* const* rows, const Next* next, int dim,
              float* scores, int64_t scores_stride);
  // out[g] += the sum of weights[g][r] * rows[r] over a block of rows, for all heads of the group.
  void (*add)(const float* weights, int64_t weights_stride, int group, const void* const* rows, const Next* next,
              int dim, float* out, int64_t out_stride);
  // Reads a row of n as floats: in order, and in pairs padded with zeros.
  void (*read)(const void* row, int n, float* plain, float* pairs);
  // Returns a row of n as floats: itself, or converted into `to`.
  const float* (*as_floats)(const void* row, int n, float* to);
  // Returns the sum of squares of `count` rows of n, `apart` bytes apart.
  float (*squares)(const char* rows, int64_t apart, int count, int n);
  // Writes n floats, scaled, to a row.
  void (*from_floats)(const float* plain, float scale, int n, void* row);
  // Reorders n floats into pairs, padded with zeros.
  void (*pack)(const float* plain, int n, float* pairs);
  // Reads rows as rotated floats; computes a key's rotated half. See src/rotate.hpp.
  void (*turn)(const void* const* rows, const void* const* halves, int count, int n, const int32_t* by, const Rope& rope,
               float* half, float* to, int64_t stride);
  void (*turn_quarter)(const void* key, const Rope& rope, void* half);
  // Writes pairs, scaled, to a row of n.
  void (*write)(const float* pairs, float scale, int n, void* row);
  Tiles tiles;
  Bounds bounds;
};

extern const Dtype float32, bfloat16, float16;

template <class T>
constexpr const Dtype* dtype = std::is_same_v<T, float> ? &float32 : std::is_same_v<T, bf16> ? &bfloat16 : &float16;

}  // namespace kvdsl
