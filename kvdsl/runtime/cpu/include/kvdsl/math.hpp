// The language's functions, as generated code calls them. Everything is IEEE: NaN goes through.
#pragma once

#include <cmath>

namespace kvdsl {

template <class X>
inline X square(X x) {
  return x * x;
}

// A product as it is, never fused with an addition: one bit decides what it is floored to.
inline double rounded(double product) {
  const volatile double stored = product;
  return stored;
}

// The larger of two, NaN if either is.
template <class X>
inline X maximum(X a, X b) {
  return ((a > b) | (a != a)) ? a : b;
}

template <class X>
inline X minimum(X a, X b) {
  return ((a < b) | (a != a)) ? a : b;
}

// The remainder with the sign of the divisor, as Python has it.
template <class X>
inline X modulo(X a, X b) {
  const X rest = std::fmod(a, b);
  return ((rest != 0) & ((rest < 0) != (b < 0))) ? rest + b : rest;
}

// What a fold holds, before its first query `start`.
inline float begun(float held, float start) { return held != held ? start : held; }

// A moving average after x has joined it. A token's own query, at which its age is 0, is the first to.
inline float ema(float old, float x, float decay, int age) {
  return age == 0 ? x : decay * old + (1.0f - decay) * x;
}

// Reductions of value(d) over the dims of a vector.
template <class Value>
inline float sum_over(int dims, Value&& value) {
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int d = 0; d < dims; ++d) total += value(d);
  return total;
}

template <class Value>
inline float mean_over(int dims, Value&& value) {
  return sum_over(dims, value) / static_cast<float>(dims);
}

template <class Value>
inline float var_over(int dims, Value&& value) {
  const float centre = mean_over(dims, value);
  return mean_over(dims, [&](int d) { return square(value(d) - centre); });
}

template <class Value>
inline float std_over(int dims, Value&& value) {
  return std::sqrt(var_over(dims, value));
}

template <class Value>
inline float max_over(int dims, Value&& value) {
  float top = value(0);
  for (int d = 1; d < dims; ++d) top = maximum(top, value(d));
  return top;
}

template <class Value>
inline float min_over(int dims, Value&& value) {
  float least = value(0);
  for (int d = 1; d < dims; ++d) least = minimum(least, value(d));
  return least;
}

}  // namespace kvdsl
