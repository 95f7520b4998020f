// A dtype of the model as the driver knows it: functions behind pointers, so that the driver is compiled once for all of them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "types.hpp"

namespace kvdsl {

struct Next;
struct Rope;

// What is done to the tiles of a sketch, see src/sketch.hpp.
struct Tiles {
  void (*put)(const void* key, const int32_t* dims, int count, int r, void* tile);
  void (*fill)(const void* keys, int dim, int first, int end, const int32_t* dims, int count, void* tile);
  void (*dot)(const void* tile, const float* q, int64_t q_stride, int heads, int count, float* scores);
};

// And to the bounds of pages, see src/pages.hpp.
struct Bounds {
  void (*add)(const void* key, int dim, bool first, void* bounds);
  void (*score)(const void* bounds, int dim, const float* q, int64_t q_stride, int group, float* scores, int64_t stride);
};

struct Dtype {
  int size;
  // scores[g][r] = q[g] . rows[r] for a block of rows and all heads of the group. `next`: null where there is nothing to fetch.
  void (*dot)(const float* q, int64_t q_stride, int group, const void* const* rows, const Next* next, int dim,
              float* scores, int64_t scores_stride);
  // out[g] += the sum of weights[g][r] * rows[r] over a block of rows, for all heads of the group.
  void (*add)(const float* weights, int64_t weights_stride, int group, const void* const* rows, const Next* next,
              int dim, float* out, int64_t out_stride);
  // A row of n as floats: in order, and in pairs with zeros behind.
  void (*read)(const void* row, int n, float* plain, float* pairs);
  // A row of n as floats in order: itself, or converted into `to`.
  const float* (*as_floats)(const void* row, int n, float* to);
  // The sum of the squares of rows of n, so many bytes apart.
  float (*squares)(const char* rows, int64_t apart, int count, int n);
  // n floats in order, scaled, into a row.
  void (*from_floats)(const float* plain, float scale, int n, void* row);
  // n floats that are in order, in pairs with zeros behind.
  void (*pack)(const float* plain, int n, float* pairs);
  // Rows as floats, in order, turned; and a key's half. See src/rotate.hpp.
  void (*turn)(const void* const* rows, const void* const* halves, int count, int n, const int32_t* by, const Rope& rope,
               float* half, float* to, int64_t stride);
  void (*turn_quarter)(const void* key, const Rope& rope, void* half);
  // And back: pairs, scaled, into a row of n.
  void (*write)(const float* pairs, float scale, int n, void* row);
  Tiles tiles;
  Bounds bounds;
};

extern const Dtype float32, bfloat16, float16;

template <class T>
constexpr const Dtype* dtype = std::is_same_v<T, float> ? &float32 : std::is_same_v<T, bf16> ? &bfloat16 : &float16;

}  // namespace kvdsl
