// Reductions over the dims of one token's key or value in double, in an order that all backends share, so that results
// are bit-identical. docs/language.md defines the order.
//
// Compile with -ffp-contract=off: only a product of two floats is exact in double.
#pragma once

#include <cmath>

#include "math.hpp"

namespace kvdsl::ordered {

// Neighbouring dims that are added in parallel; a power of two.
struct Lanes {
  static constexpr int count = 32;
  double x[count];
};

// Adding 0 turns -0 into +0, so that zero padding changes nothing.
template <class Value>
inline Lanes lanes(int first, int dims, Value&& value) {
  Lanes loaded = {};
  if (first + Lanes::count <= dims) {
    for (int i = 0; i < Lanes::count; ++i) loaded.x[i] = value(first + i) + 0.0;
  } else {
    for (int i = 0; first + i < dims; ++i) loaded.x[i] = value(first + i) + 0.0;
  }
  return loaded;
}

// Sums every `step`-th piece of Lanes::count dims from `first` on, by halves.
template <class Value>
inline Lanes folded(int first, int step, int size, int dims, Value&& value) {
  if (step >= size) return lanes(first, dims, value);
  Lanes sum = folded(first, 2 * step, size, dims, value);
  if (first + step < dims) {
    const Lanes more = folded(first + step, 2 * step, size, dims, value);
    for (int i = 0; i < Lanes::count; ++i) sum.x[i] += more.x[i];
  }
  return sum;
}

// Adds the second half of the dims to the first until one is left. Zeros pad the dims to a power of two.
template <class Value>
inline double sum_over(int dims, Value&& value) {
  int size = Lanes::count;
  while (size < dims) size *= 2;
  Lanes sum = folded(0, Lanes::count, size, dims, value);
  for (int n = Lanes::count / 2; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) sum.x[i] += sum.x[i + n];
  }
  return sum.x[0];
}

template <class Value>
inline double mean_over(int dims, Value&& value) {
  return sum_over(dims, value) / dims;
}

template <class Value>
inline double var_over(int dims, Value&& value) {
  const double centre = mean_over(dims, value);
  return mean_over(dims, [&](int d) { return square(value(d) - centre); });
}

template <class Value>
inline double std_over(int dims, Value&& value) {
  return std::sqrt(var_over(dims, value));
}

template <class Value>
inline double max_over(int dims, Value&& value) {
  double top = value(0);
  for (int d = 1; d < dims; ++d) top = maximum(top, static_cast<double>(value(d)));
  return top + 0.0;
}

template <class Value>
inline double min_over(int dims, Value&& value) {
  double least = value(0);
  for (int d = 1; d < dims; ++d) least = minimum(least, static_cast<double>(value(d)));
  return least + 0.0;
}

}  // namespace kvdsl::ordered
