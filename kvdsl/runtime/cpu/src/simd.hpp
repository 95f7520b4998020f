// The vector of floats, by compiler vector extensions: the same source serves AVX-512, AVX2, NEON and plain SSE.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include <kvdsl/types.hpp>

namespace kvdsl {

#if defined(__AVX512F__)
constexpr int width = 16;
#elif defined(__AVX__)
constexpr int width = 8;
#else
constexpr int width = 4;
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int registers = 32;
#else
constexpr int registers = 16;
#endif

typedef float Floats __attribute__((vector_size(width * 4)));
typedef int32_t Ints __attribute__((vector_size(width * 4)));
typedef uint32_t Bits __attribute__((vector_size(width * 4)));

// x - 0 equals x, also for -0, so only the broadcast load remains. 0 + x would compile to an addition.
inline Floats splat(float x) { return x - Floats{}; }

// A vector at any address.
template <class V, class P>
inline V load_as(const P* from) {
  typedef V Unaligned __attribute__((aligned(1), may_alias));
  return *reinterpret_cast<const Unaligned*>(from);
}

inline void store(float* to, Floats v) {
  typedef Floats Unaligned __attribute__((aligned(4), may_alias));
  *reinterpret_cast<Unaligned*>(to) = v;
}

// Loads v once for all uses. Without this, GCC reads memory again for every multiplication.
template <class V>
inline V once(V v) {
#if defined(__x86_64__)
  asm("" : "+v"(v));
#endif
  return v;
}

// Kernels load 2 * width elements at a time as floats. The order inside a pair depends on the dtype: bf16 yields its
// even and its odd elements, at the cost of a shift and a mask. Sums over all elements do not depend on the order;
// place_of() restores it.
struct Pair {
  Floats a, b;
};
constexpr int pair = 2 * width;

inline Pair load_pair(const float* from) { return {once(load_as<Floats>(from)), once(load_as<Floats>(from + width))}; }

inline Pair load_pair(const bf16* from) {
  const Bits both = load_as<Bits>(from);
  return {reinterpret_cast<Floats>(both << 16), reinterpret_cast<Floats>(both & 0xFFFF0000u)};
}

// Half precision has no portable intrinsics, and including <immintrin.h> takes longer than all of these headers.
inline Floats load_halves(const f16* from) {
#if defined(__AVX512F__)
  typedef int16_t Halves __attribute__((vector_size(32)));
  return __builtin_ia32_vcvtph2ps512_mask(load_as<Halves>(from), Floats{}, -1, 4);
#elif defined(__F16C__) && defined(__AVX__)
  typedef int16_t Halves __attribute__((vector_size(16)));
  return __builtin_ia32_vcvtph2ps256(load_as<Halves>(from));
#else
  Floats v;
  for (int i = 0; i < width; ++i) v[i] = to_float(from[i]);
  return v;
#endif
}

inline Pair load_pair(const f16* from) { return {load_halves(from), load_halves(from + width)}; }

// Loads the first n elements of a pair, padded with zeros: a row's tail. Never reads beyond the row.
template <class T>
inline Pair load_pair(const T* from, int n) {
  if (n >= pair) return load_pair(from);
  T padded[pair] = {};
  const int half = n >= width ? width : 0;
  if (half > 0) __builtin_memcpy(padded, from, sizeof(T) * width);
  if (n > half) __builtin_memcpy(padded + half, from + half, sizeof(T) * static_cast<unsigned>(n - half));
  return load_pair(padded);
}

// Returns where element d lies in a row stored as pairs.
template <class T>
constexpr int place_of(int d) {
  if (!std::is_same_v<T, bf16>) return d;
  return d / pair * pair + d % 2 * width + d % pair / 2;
}

inline Floats load(const float* from) { return load_as<Floats>(from); }

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

// e^x to about 1 ulp, for float and Floats. exp(-inf) = 0, exp(NaN) = NaN; results below 2^-125 become 0.
template <class F, class U>
inline F exp_of(F x) {
  const F clamped = x > 89.0f ? F{} + 89.0f : x;  // not min(): NaN must pass
  // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits of the mantissa.
  const F shifted = clamped * 1.44269504088896341f + 12582912.0f;
  const F n = shifted - 12582912.0f;
  const F r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts: the first product is exact
  F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // 2^(n-1), then doubled, so that n = 128 does not overflow. Unsigned, because for very negative x bits are shifted
  // out; that result is discarded.
  U exponent;
  __builtin_memcpy(&exponent, &shifted, sizeof(exponent));
  exponent = (exponent - 0x4B400000u + 126u) << 23;
  F scale;
  __builtin_memcpy(&scale, &exponent, sizeof(scale));
  const F result = p * scale * 2.0f;
  return x < -86.9f ? F{} : result;
}

inline float exp(float x) { return exp_of<float, uint32_t>(x); }
inline Floats exp(Floats x) { return exp_of<Floats, Bits>(x); }

// 2^x to about 1 ulp, for x below 127. exp2(-inf) = 0, exp2(NaN) = NaN; results below 2^-125 become 0.
inline Floats exp2(Floats x) {
  const Floats shifted = x + 12582912.0f;  // rounds, as in exp
  const Floats r = x - (shifted - 12582912.0f);
  Floats p = r * 1.5353362026e-4f + 1.3398874650e-3f;
  p = p * r + 9.6184373591e-3f;
  p = p * r + 5.5503324705e-2f;
  p = p * r + 2.4022647914e-1f;
  p = p * r + 6.9314720286e-1f;
  p = p * r + 1.0f;
  // Adds the integer part to the exponent; the shift drops the rounding constant.
  const Bits result = reinterpret_cast<Bits>(p) + (reinterpret_cast<Bits>(shifted) << 23);
  return x < -125.0f ? Floats{} : x == x ? reinterpret_cast<Floats>(result) : x;  // NaN has arbitrary bits
}

// Small arguments by a polynomial, for relative precision; others by 1 - 2 / (e^2|x| + 1).
inline Floats tanh(Floats x) {
  const Floats size = x < 0.0f ? -x : x;
  const Floats square = x * x;
  Floats p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const Floats small = p * square * x + x;
  const Floats tail = 1.0f - 2.0f / (exp(size + size) + 1.0f);
  return size < 0.625f ? small : (x < 0.0f ? -tail : tail);
}

// Whether a mask has any lane.
inline bool any(Ints mask) {
  int32_t found = 0;
  for (int i = 0; i < width; ++i) found |= mask[i];
  return found != 0;
}

// Lanes from half a run on, in place of its first half.
template <int Half, std::size_t... Lane>
inline Floats upper(Floats v, std::index_sequence<Lane...>) {
  return __builtin_shufflevector(v, v, static_cast<int>(Lane < Half ? Lane + Half : Lane)...);
}

// Combines all lanes by halves.
template <int Half, class Join>
inline float reduced(Floats v, Join join) {
  if constexpr (Half == 0) {
    return v[0];
  } else {
    return reduced<Half / 2>(join(v, upper<Half>(v, std::make_index_sequence<width>{})), join);
  }
}

inline float sum(Floats v) {
  return reduced<width / 2>(v, [](Floats a, Floats b) { return a + b; });
}

inline float max(Floats v) {
  return reduced<width / 2>(v, [](Floats a, Floats b) { return max(b, a); });
}

// Calls body(0), body(1), ... with constants, so that what they index can stay in registers.
template <class Body, int... I>
[[gnu::always_inline]] inline void unrolled(std::integer_sequence<int, I...>, Body&& body) {
  (body(std::integral_constant<int, I>{}), ...);
}

template <int Count, class Body>
[[gnu::always_inline]] inline void unrolled(Body&& body) {
  unrolled(std::make_integer_sequence<int, Count>{}, body);
}

// The same for all pairs of numbers.
template <int Count, int Heads, class Body>
[[gnu::always_inline]] inline void for_all(Body&& body) {
  unrolled<Count>([&](auto i) { unrolled<Heads>([&](auto g) { body(i, g); }); });
}

// Many sums at once. A fold adds the halves of every run of `Span` lanes, of a into the run's first half and of b into
// its second. After log2(width) folds in pairs, every lane holds the total of another vector, in order.
template <int Span, bool Upper, std::size_t... Lane>
inline Floats halves(Floats a, Floats b, std::index_sequence<Lane...>) {
  constexpr std::size_t half = Span / 2;
  return __builtin_shufflevector(
      a, b, static_cast<int>((Lane % Span < half ? Lane : Lane - half + width) + (Upper ? half : 0))...);
}

template <int Span>
inline Floats fold(Floats a, Floats b) {
  constexpr auto lanes = std::make_index_sequence<width>{};
  return halves<Span, false>(a, b, lanes) + halves<Span, true>(a, b, lanes);
}

template <int Span, int Left>
inline void fold_all(Floats* v) {
  if constexpr (Span > 1) {
    constexpr int half = Left > 1 ? Left / 2 : 1;
    unrolled<half>([&](auto i) { v[i] = fold<Span>(v[i], v[Left > 1 ? i + half : +i]); });
    fold_all<Span / 2, half>(v);
  }
}

// The largest power of two up to n and up to a vector's width.
constexpr int folded_at_once(int n) {
  int count = 1;
  while (2 * count <= n && 2 * count <= width) count *= 2;
  return count;
}

// totals[i] = sum(v[i]). Overwrites v.
template <int Count>
inline void sums(Floats* v, float* totals) {
  constexpr int first = folded_at_once(Count);
  if constexpr (Count > first) {
    sums<first>(v, totals);
    sums<Count - first>(v + first, totals + first);
  } else {
    fold_all<width, Count>(v);
    unrolled<Count>([&](auto i) { totals[i] = v[0][i * (width / Count)]; });
  }
}

}  // namespace kvdsl
