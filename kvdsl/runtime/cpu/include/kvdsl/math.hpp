// The language's functions for generated code. IEEE arithmetic: NaN propagates.
#pragma once

#include <cmath>

namespace kvdsl {

template <class X>
inline X square(X x) {
  return x * x;
}

// Returns a rounded product, never fused with an addition, because it will be floored.
inline double rounded(double product) {
  const volatile double stored = product;
  return stored;
}

// Returns the larger, NaN if either is NaN.
template <class X>
inline X maximum(X a, X b) {
  return ((a > b) | (a != a)) ? a : b;
}

template <class X>
inline X minimum(X a, X b) {
  return ((a < b) | (a != a)) ? a : b;
}

// Returns the remainder with the sign of the divisor, as in Python.
template <class X>
inline X modulo(X a, X b) {
  const X rest = std::fmod(a, b);
  return ((rest != 0) & ((rest < 0) != (b < 0))) ? rest + b : rest;
}

// Returns the held number of a fold, or `start` before the first query.
inline float begun(float held, float start) { return held != held ? start : held; }

// Updates a moving average by x. The token's own query (age 0) starts it.
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
