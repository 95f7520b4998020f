// Compact positions. A cached key stays as it was rotated at its place in the text, but scores are to be as if it stood at
// its rank among the live slots, and the query at its own token's. A rotary score depends only on how far the two are
// apart (Su et al. 2021, "RoFormer", eq. 16): so the key must come nearer by as many positions as were evicted between
// them, or the query go to meet it. Which of both is turned on its way to the dot product; nothing is stored.
//
// Or, under `rope cached`, a key's rotated dims are kept a second time, a quarter of a turn further (EQUIP, section 4.3), so that a
// turned key is a sum, key cos + half sin (equation 11), of which no product crosses a pair.
#pragma once

#include <cstdint>
#include <type_traits>

#include "simd.hpp"

namespace kvdsl {

// How a layer rotates: cosines and sines of every pair's angle for a turn of any length, in two factors that stay in the
// cache: turns of 0 .. near_turns - 1 positions, and of whole multiples of near_turns.
constexpr int near_turns = 128;

struct Rope {
  const float* near;  // [near_turns, 2, pairs] cosines, then sines
  const float* far;   // [longest turn / near_turns + 1, 2, pairs]
  int pairs;          // rotated are the dims offset .. offset + 2 pairs
  int offset;
  bool interleaved;  // a pair is (2i, 2i + 1), not (i, i + pairs)
};

// Turns x, in order, by so many positions; forwards if the sign is 1, backwards if it is -1.
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

// The same, given the rotated dims a quarter of a turn further, in order.
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

// The rotated dims of a key a quarter of a turn further, (a, b) -> (-b, a): [2 pairs], exact.
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

// A row of n as floats, in order; `to` has room for whole pairs of vectors.
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

// Rows as floats, in order, each turned by `by[r]`: to[r * stride ..]. `halves` are theirs, or null; `half` has room for one.
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
