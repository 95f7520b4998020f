// Products of queries in lanes and slots' numbers, which are the same for all lanes: of floats one by one, of bfloat16
// in pairs if the processor has the instruction.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "attend.hpp"
#include "simd.hpp"

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define KVDSL_TWO_BY_TWO 1
#include <immintrin.h>
#else
#define KVDSL_TWO_BY_TWO 0
#endif

namespace kvdsl {

constexpr bool two_by_two = KVDSL_TWO_BY_TWO;

// Two bfloat16 numbers, the first in the lower half.
struct Two {
  uint32_t bits;
};

inline void store(Two* to, Bits v) { store(reinterpret_cast<float*>(to), reinterpret_cast<Floats>(v)); }

inline Two two(bf16 first, bf16 second) { return {first.bits | static_cast<uint32_t>(second.bits) << 16}; }

#if KVDSL_TWO_BY_TWO
// Interleaves the first 16 and the last 16 of 32 numbers of 16 bits.
inline __m512i side_by_side() {
  Bits from;
  for (uint32_t i = 0; i < width; ++i) from[i] = i | (i + width) << 16;
  return reinterpret_cast<__m512i>(from);
}
#endif

// A vector to multiply.
template <class X>
using Lanes = std::conditional_t<std::is_same_v<X, Two>, Bits, Floats>;

inline Floats spread(const float* x) { return splat(*x); }
inline Bits spread(const Two* x) { return Bits{} + load_as<uint32_t>(x); }

inline Floats add_product(Floats sum, Floats a, Floats b) { return sum + a * b; }
inline Floats add_product(Floats sum, Bits a, Bits b) {
#if KVDSL_TWO_BY_TWO
  const auto twos = [](Bits x) { return reinterpret_cast<__m512bh>(x); };
  return reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), twos(a), twos(b)));
#else
  (void)a, (void)b;
  return sum;
#endif
}

// sums[i][g] += lanes(g) times number(i). Sums stay in registers, and so does the smaller of lanes and numbers; the
// other passes through one more register. Nothing is read twice.
template <int Heads, int Count, class V, class LanesOf, class NumberOf>
[[gnu::always_inline]] inline void add_products(LanesOf lanes, NumberOf number, Floats (&sums)[Count][Heads]) {
  if constexpr (Heads <= Count) {
    V held[Heads];
    unrolled<Heads>([&](auto g) { held[g] = once(lanes(g)); });
    unrolled<Count>([&](auto i) {
      const V one = once(number(i));
      unrolled<Heads>([&](auto g) { sums[i][g] = add_product(sums[i][g], held[g], one); });
    });
  } else {
    V held[Count];
    unrolled<Count>([&](auto i) { held[i] = once(number(i)); });
    unrolled<Heads>([&](auto g) {
      const V one = once(lanes(g));
      unrolled<Count>([&](auto i) { sums[i][g] = add_product(sums[i][g], one, held[i]); });
    });
  }
}

// Slots scored at once, for `Heads` query heads of a group.
template <int Heads>
constexpr int slots_at_once = (registers == 32 ? 24 : 12) / Heads;

// scores[s][g] = q[g] times keys[s], for `Heads` query heads. q: [group, dims, width]. scores: [slots, group, width].
template <int Heads, int Count, class X>
void dot_lanes(const X* q, int group, const X* const* keys, int dims, float* scores) {
  Floats sums[Count][Heads] = {};
  for (int d = 0; d < dims; ++d) {
    const auto lanes = [&](int g) { return load_as<Lanes<X>>(q + (int64_t{g} * dims + d) * width); };
    const auto key = [&](int s) { return spread(keys[s] + d); };
    add_products<Heads, Count, Lanes<X>>(lanes, key, sums);
  }
  for_all<Count, Heads>([&](auto s, auto g) { store(scores + (int64_t{s} * group + g) * width, sums[s][g]); });
}

// Dims of a value added at once: a power of two, at most value_pad.
template <int Heads>
constexpr int values_at_once = registers == 32 ? (Heads == 1 ? 16 : Heads == 4 ? 4 : 8) : Heads == 1 ? 8 : Heads == 4 ? 2 : 4;
constexpr int value_pad = 16;

// sums[v][g] += weights[s][g] times values[s][v], over all slots, for `Heads` query heads. weights: [slots, group,
// width]. values: [slots, stride]. sums: [values, group, width].
template <int Heads, int Count, class X>
void add_lanes(const X* weights, int group, const X* values, int64_t stride, int slots, float* sums) {
  Floats total[Count][Heads];
  for_all<Count, Heads>([&](auto v, auto g) { total[v][g] = load(sums + (int64_t{v} * group + g) * width); });
  for (int s = 0; s < slots; ++s) {
    const auto lanes = [&](int g) { return load_as<Lanes<X>>(weights + (int64_t{s} * group + g) * width); };
    const auto value = [&](int v) { return spread(values + s * stride + v); };
    add_products<Heads, Count, Lanes<X>>(lanes, value, total);
  }
  for_all<Count, Heads>([&](auto v, auto g) { store(sums + (int64_t{v} * group + g) * width, total[v][g]); });
}

// Shuffles runs of 2 `Half` lanes: the first halves of a and b, or the second ones.
template <int Half, bool Second, std::size_t... Lane>
inline Bits swapped(Bits a, Bits b, std::index_sequence<Lane...>) {
  constexpr auto from = [](std::size_t lane) {
    const bool upper = lane & Half;
    return static_cast<int>(Second ? (upper ? lane + width : lane + Half) : (upper ? lane - Half + width : lane));
  };
  return __builtin_shufflevector(a, b, from(Lane)...);
}

template <int Half>
inline void swap_halves(Bits (&m)[width]) {
  if constexpr (Half > 0) {
    constexpr auto lanes = std::make_index_sequence<width>{};
    for (int i = 0; i < width; ++i) {
      if (i & Half) continue;
      const Bits a = m[i], b = m[i + Half];
      m[i] = swapped<Half, false>(a, b, lanes);
      m[i + Half] = swapped<Half, true>(a, b, lanes);
    }
    swap_halves<Half / 2>(m);
  }
}

// Transposes: to[j][i] = from[i][j] for i and j below `width`, 32 bits each.
template <class X>
void turn(const X* from, int64_t from_stride, X* to, int64_t to_stride) {
  Bits m[width];
  for (int i = 0; i < width; ++i) m[i] = load_as<Bits>(from + i * from_stride);
  swap_halves<width / 2>(m);
  for (int i = 0; i < width; ++i) store(reinterpret_cast<Two*>(to + i * to_stride), m[i]);
}

// Rounds the finite weights of two slots to nearest bfloat16, as pairs.
inline Bits two(Floats first, Floats second) {
#if KVDSL_TWO_BY_TWO
  const __m512bh one_behind_the_other = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(second), reinterpret_cast<__m512>(first));
  return reinterpret_cast<Bits>(_mm512_permutexvar_epi16(side_by_side(), reinterpret_cast<__m512i>(one_behind_the_other)));
#else
  const auto rounded = [](Floats x) {
    const Bits bits = reinterpret_cast<Bits>(x);
    return bits + 0x7FFFu + (bits >> 16 & 1u);
  };
  return rounded(first) >> 16 | (rounded(second) & 0xFFFF0000u);
#endif
}

}  // namespace kvdsl
