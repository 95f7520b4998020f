// Compact positions. A cached key keeps its rotation by text position, but scores must be as if it were at its rank
// among the live slots and the query at its own token's rank. A rotary score depends only on the distance (Su et al.
// 2021, "RoFormer", eq. 16). So either the key or the query is rotated by the number of tokens evicted between them, on
// its way to the dot product; nothing is stored.
//
// Under `rope cached`, a key's rotary dims are also stored rotated by a quarter turn (EQUIP, section 4.3). A rotated
// key is then key cos + half sin (equation 11), without products across pairs.
#pragma once

#include <cstdint>
#include <type_traits>

#include "simd.hpp"

namespace kvdsl {

// A layer's rotation: cosines and sines of every pair's angle for any shift, in two tables that fit the cache: shifts
// of 0 .. near_turns - 1 positions, and multiples of near_turns.
constexpr int near_turns = 128;

struct Rope {
  const float* near;  // [near_turns, 2, pairs] cosines, then sines
  const float* far;   // [longest shift / near_turns + 1, 2, pairs]
  int pairs;          // rotated dims are offset .. offset + 2 pairs
  int offset;
  bool interleaved;  // pairs are (2i, 2i + 1), not (i, i + pairs)
};

// Rotates x, in order, by a number of positions; sign 1 is forwards, -1 backwards.
template <bool interleaved>
inline void turn_pairs(float* x, int by, float sign, const Rope& rope) {
  const int pairs = rope.pairs;
  const float* const near_cos = rope.near + by % near_turns * 2 * int64_t{pairs};
  const float* const far_cos = rope.far + by / near_turns * 2 * int64_t{pairs};
  const float* const near_sin = near_cos + pairs;
  const float* const far_sin = far_cos + pairs;
  float* const first = x + rope.offset;
  float* const second = first + (interleaved ? 1 : pairs);
  constexpr int step = interleaved ? 2 : 1;
#pragma omp simd
  for (int i = 0; i < pairs; ++i) {
    const float cos = far_cos[i] * near_cos[i] - far_sin[i] * near_sin[i];
    const float sin = (far_sin[i] * near_cos[i] + far_cos[i] * near_sin[i]) * sign;
    const float a = first[i * step], b = second[i * step];
    first[i * step] = a * cos - b * sin;
    second[i * step] = a * sin + b * cos;
  }
}

[[gnu::noinline]] inline void turn(float* x, int by, float sign, const Rope& rope) {
  if (rope.interleaved) turn_pairs<true>(x, by, sign, rope);
  else turn_pairs<false>(x, by, sign, rope);
}

// The same, given the rotary dims rotated by a quarter turn.
template <bool interleaved>
inline void add_halves(float* x, const float* half, int by, const Rope& rope) {
  const int pairs = rope.pairs;
  const float* const near_cos = rope.near + by % near_turns * 2 * int64_t{pairs};
  const float* const far_cos = rope.far + by / near_turns * 2 * int64_t{pairs};
  const float* const near_sin = near_cos + pairs;
  const float* const far_sin = far_cos + pairs;
  float* const to = x + rope.offset;
  constexpr int step = interleaved ? 2 : 1;
  const int second = interleaved ? 1 : pairs;
#pragma omp simd
  for (int i = 0; i < pairs; ++i) {
    const float cos = far_cos[i] * near_cos[i] - far_sin[i] * near_sin[i];
    const float sin = far_sin[i] * near_cos[i] + far_cos[i] * near_sin[i];
    to[i * step] = to[i * step] * cos + half[i * step] * sin;
    to[i * step + second] = to[i * step + second] * cos + half[i * step + second] * sin;
  }
}

// Rotates a key's rotary dims by a quarter turn, (a, b) -> (-b, a): [2 pairs], exact.
template <class T>
void turn_quarter(const void* key, const Rope& rope, void* half) {
  const T* const from = static_cast<const T*>(key) + rope.offset;
  T* const to = static_cast<T*>(half);
  const int step = rope.interleaved ? 2 : 1, second = rope.interleaved ? 1 : rope.pairs;
  for (int i = 0; i < rope.pairs; ++i) {
    to[i * step] = from_float<T>(-to_float(from[i * step + second]));
    to[i * step + second] = from[i * step];
  }
}

// Reads a row of n as floats in order; `to` has room for whole pairs of vectors.
template <class T>
inline void widen(const T* row, int n, float* to) {
  int d = 0;
  if constexpr (std::is_same_v<T, bf16>) {
    typedef uint16_t Halves __attribute__((vector_size(width * 2)));
    for (; d + width <= n; d += width) {
      const Bits bits = __builtin_convertvector(load_as<Halves>(row + d), Bits) << 16;
      store(to + d, reinterpret_cast<Floats>(bits));
    }
    for (; d < n; ++d) to[d] = to_float(row[d]);
  } else {
    for (; d < n; d += pair) {
      const Pair x = load_pair(row + d, n - d);
      store(to + d, x.a);
      store(to + d + width, x.b);
    }
  }
}

// Reads rows as floats in order, each rotated by `by[r]`, to to[r * stride ..]. `halves`: their halves or null; `half`
// has room for one.
template <class T>
void turn_rows(const void* const* rows, const void* const* halves, int count, int n, const int32_t* by, const Rope& rope,
               float* half, float* to, int64_t stride) {
  for (int r = 0; r < count; ++r) {
    float* const x = to + r * stride;
    widen(static_cast<const T*>(rows[r]), n, x);
    if (by[r] == 0) continue;
    if (!halves) {
      turn(x, by[r], 1.0f, rope);
      continue;
    }
    widen(static_cast<const T*>(halves[r]), 2 * rope.pairs, half);
    if (rope.interleaved) add_halves<true>(x, half, by[r], rope);
    else add_halves<false>(x, half, by[r], rope);
  }
}

}  // namespace kvdsl
