// Quantized keys and values. A vector is a row of codes followed by its scales: kvdsl/interp/rounding.py defines the
// numbers, kvdsl/runtime/state/packed.py the format. Rows are dequantized in registers.
//
// In four bits, vectors are multiplied by a Hadamard matrix, which preserves products: so the query is transformed once
// instead of every key, and the weighted sum of values is transformed back once.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <kvdsl/types.hpp>

#include "simd.hpp"

namespace kvdsl {

struct Next;

struct Int8 {
  int8_t code;
};
struct Float8 {  // e4m3
  uint8_t bits;
};
struct Int4 {
  uint8_t two;
};

template <class T>
constexpr bool has_row_scale = std::is_same_v<T, Int8> || std::is_same_v<T, Float8>;
template <class T>
constexpr bool is_packed = has_row_scale<T> || std::is_same_v<T, Int4>;
template <class T>
constexpr int bits_of = std::is_same_v<T, Int4> ? 4 : 8 * static_cast<int>(sizeof(T));

// Dims per scale in four bits.
constexpr int scaled_together = 32;

// Returns the n-th scale from there.
inline float scale_at(const void* from, int n) {
  bf16 scale;
  std::memcpy(&scale, static_cast<const char*>(from) + 2 * n, sizeof(scale));
  return to_float(scale);
}

// Returns the scale of a whole row; 1 without one.
template <class T>
inline float row_scale(const void* row, int dim) {
  if constexpr (has_row_scale<T>) return scale_at(static_cast<const char*>(row) + dim, 0);
  return 1.0f;
}

// Converts `width` bytes to 32-bit integers. With the intrinsic, GCC does not go byte by byte.
template <class Byte>
inline auto widened(const void* from) {
#if defined(__AVX2__) && !defined(__clang__)
  typedef char Sixteen __attribute__((vector_size(16)));
  constexpr bool is_signed = std::is_signed_v<Byte>;
#if defined(__AVX512F__)
  const Sixteen bytes = load_as<Sixteen>(static_cast<const char*>(from));
  if constexpr (is_signed) return reinterpret_cast<Ints>(__builtin_ia32_pmovsxbd512_mask(bytes, Ints{}, -1));
  else return reinterpret_cast<Bits>(__builtin_ia32_pmovzxbd512_mask(bytes, Ints{}, -1));
#else
  typedef long long Two __attribute__((vector_size(16)));
  long long eight;
  std::memcpy(&eight, from, sizeof(eight));
  const Sixteen bytes = reinterpret_cast<Sixteen>(Two{eight, 0});
  if constexpr (is_signed) return reinterpret_cast<Ints>(__builtin_ia32_pmovsxbd256(bytes));
  else return reinterpret_cast<Bits>(__builtin_ia32_pmovzxbd256(bytes));
#endif
#else
  typedef Byte Bytes __attribute__((vector_size(width)));
  return __builtin_convertvector(load_as<Bytes>(static_cast<const Byte*>(from)), std::conditional_t<std::is_signed_v<Byte>, Ints, Bits>);
#endif
}

inline Floats floats_of(const Int8* from) { return __builtin_convertvector(widened<int8_t>(from), Floats); }

// 2^120 moves the exponent's bias from 7 to 127 and normalizes subnormals.
inline Floats floats_of(const Float8* from) {
  const Bits x = widened<uint8_t>(from), bits = (x & 0x80u) << 24 | (x & 0x7Fu) << 20;
  return reinterpret_cast<Floats>(bits) * 0x1p120f;
}

inline Pair load_pair(const Int8* from) { return {floats_of(from), floats_of(from + width)}; }
inline Pair load_pair(const Float8* from) { return {floats_of(from), floats_of(from + width)}; }

// Returns element d of a four-bit row, scaled.
inline float element(const void* row, int d, int dim) {
  const int start = d / scaled_together * scaled_together, left = dim - start;
  const int half = (left < scaled_together ? left : scaled_together) / 2, i = d - start;
  const uint8_t two = static_cast<const uint8_t*>(row)[start / 2 + i % half];
  const int code = (i < half ? two & 15 : two >> 4) - 8;
  return static_cast<float>(code) * scale_at(static_cast<const char*>(row) + dim / 2, d / scaled_together);
}

// Returns elements d to d + pair of a four-bit row, scaled, zeros beyond its end.
[[gnu::noinline]] inline void elements(const void* row, int d, int dim, float (&plain)[pair]) {
  for (int i = 0; i < pair; ++i) plain[i] = d + i < dim ? element(row, d + i, dim) : 0.0f;
}

// Returns elements d to d + pair of a row, zeros beyond its end, without the scale of a whole row.
template <class T>
inline Pair load_part(const void* row, int d, int dim) {
  if constexpr (std::is_same_v<T, Int4>) {
    float plain[pair];
    elements(row, d, dim, plain);
    return load_pair(plain);
  } else {
    return load_pair(static_cast<const T*>(row) + d, dim - d);
  }
}

// The same if the row has all of them.
template <class T>
inline Pair load_whole(const void* row, int d, int dim) {
  if constexpr (std::is_same_v<T, Int4>) {
    const int group = d / scaled_together, in = d % scaled_together;
    constexpr int half = scaled_together / 2;
    if ((group + 1) * scaled_together > dim) return load_part<T>(row, d, dim);
    const uint8_t* const codes = static_cast<const uint8_t*>(row) + group * half;
    const Floats scale = splat(scale_at(static_cast<const char*>(row) + dim / 2, group));
    const auto at = [=](int i) {
      const Bits two = widened<uint8_t>(codes + i % half), code = i < half ? two & 15u : two >> 4;
      return __builtin_convertvector(reinterpret_cast<Ints>(code) - 8, Floats) * scale;
    };
    return {at(in), at(in + width)};
  } else {
    return load_pair(static_cast<const T*>(row) + d);
  }
}

// Returns the size of the Hadamard matrix: the largest power of two that divides the dims.
inline int turned_together(int dim) { return dim & -dim; }

// Multiplies blocks of a vector by a Hadamard matrix of 1 and -1.
[[gnu::noinline]] inline void hadamard(float* x, int n) {
  for (int apart = 1; apart < turned_together(n); apart *= 2) {
    for (int i = 0; i < n; i += 2 * apart) {
      for (int j = i; j < i + apart; ++j) {
        const float a = x[j], b = x[j + apart];
        x[j] = a + b;
        x[j + apart] = a - b;
      }
    }
  }
}

// Dequantizes a row to floats in order; `to` has room for whole pairs of vectors.
template <class T>
void unpack_row(const void* row, int n, float* to) {
  const Floats scale = splat(row_scale<T>(row, n));
  for (int d = 0; d < n; d += pair) {
    const Pair x = d + pair <= n ? load_whole<T>(row, d, n) : load_part<T>(row, d, n);
    store(to + d, x.a * scale);
    store(to + d + width, x.b * scale);
  }
  if constexpr (std::is_same_v<T, Int4>) {
    hadamard(to, n);
    const float part = 1.0f / static_cast<float>(turned_together(n));
    for (int d = 0; d < n; ++d) to[d] *= part;
  }
}

// Returns the scale: the largest magnitude divided by the largest code, rounded up to bfloat16.
inline float scale_of(float size, float largest) {
  const uint32_t bits = (bit_cast<uint32_t>(size / largest) + 0xFFFFu) & 0xFFFF0000u;
  const float scale = bit_cast<float>(bits);
  return scale > 0x1p-126f ? scale : 0x1p-126f;
}

// Returns the scale, or NaN, and whether it is finite.
inline bool put_scale(float scale, float size, void* to) {
  const bool finite = size <= FLT_MAX;
  const bf16 bits{static_cast<uint16_t>(finite ? bit_cast<uint32_t>(scale) >> 16 : 0x7FC0u)};
  std::memcpy(to, &bits, sizeof(bits));
  return finite;
}

// Rounds to the nearest e4m3, for magnitudes up to 448.
inline uint8_t float8(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 24 & 0x80u, size = bits & 0x7FFFFFFFu;
  const float magnitude = bit_cast<float>(size);
  const uint32_t code = magnitude < 0x1p-6f ? static_cast<uint32_t>(std::nearbyint(magnitude * 512.0f))
                                            : ((size + 0x7FFFFu + (size >> 20 & 1u)) >> 20) - (120u << 3);
  return static_cast<uint8_t>(sign | code);
}

// Quantizes a vector to a row. work: [n].
template <class T>
void pack_stored(const float* x, int n, float* work, void* row) {
  uint8_t* const to = static_cast<uint8_t*>(row);
  if constexpr (std::is_same_v<T, Int4>) {
    std::memcpy(work, x, sizeof(float) * static_cast<std::size_t>(n));
    hadamard(work, n);
    for (int start = 0, group = 0; start < n; start += scaled_together, ++group) {
      const int count = n - start < scaled_together ? n - start : scaled_together, half = count / 2;
      const float* const own = work + start;
      float low = own[0], high = own[0];
      for (int i = 0; i < count; ++i) {
        low = own[i] < low || own[i] != own[i] ? own[i] : low;
        high = own[i] > high || own[i] != own[i] ? own[i] : high;
      }
      const float size = -low >= high || low != low ? -low : high;
      const float scale = -low >= high ? scale_of(size, 8.0f) : -scale_of(size, 8.0f);
      const bool finite = put_scale(scale, size, to + n / 2 + 2 * group);
      const auto code = [=](int i) {
        const float ratio = finite ? std::nearbyint(own[i] / scale) : 0.0f;
        return static_cast<int>(ratio > 7.0f ? 7.0f : ratio < -8.0f ? -8.0f : ratio) + 8;
      };
      for (int i = 0; i < half; ++i) to[start / 2 + i] = static_cast<uint8_t>(code(i) | code(i + half) << 4);
    }
  } else {
    float size = 0;
    for (int d = 0; d < n; ++d) size = std::fabs(x[d]) > size || x[d] != x[d] ? std::fabs(x[d]) : size;
    const float scale = scale_of(size, std::is_same_v<T, Int8> ? 127.0f : 448.0f);
    const bool finite = put_scale(scale, size, to + n);
    for (int d = 0; d < n; ++d) {
      const float ratio = finite ? x[d] / scale : 0.0f;
      to[d] = std::is_same_v<T, Int8> ? static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(ratio))) : float8(ratio);
    }
  }
}

template <class T>
int64_t stored_bytes(int dim) {
  return std::is_same_v<T, Int4> ? dim / 2 + 2 * ((dim + scaled_together - 1) / scaled_together) : dim + 2;
}

// Operations on packed rows, like `Dtype`; other vectors are float32.
struct Stored {
  bool turned;  // by a Hadamard matrix
  int64_t (*bytes)(int dim);
  void (*dot)(const float* q, int64_t q_stride, int group, const void* const* rows, const Next* next, int dim, float* scores,
              int64_t scores_stride);
  void (*add)(const float* weights, int64_t weights_stride, int group, const void* const* rows, const Next* next, int dim,
              float* out, int64_t out_stride);
  void (*pack)(const float* x, int n, float* work, void* row);
  void (*unpack)(const void* row, int n, float* to);
};

// int8, int4, fp8: index `key_dtype` or `value_dtype` - 1.
extern const Stored stored[3];

}  // namespace kvdsl
