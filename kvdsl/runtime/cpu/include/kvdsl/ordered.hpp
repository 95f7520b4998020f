// Reductions of value(d) over the dims of one token's key or value: doubles, added in an order that all backends share, so that
// what a token is worth by itself is to the bit the same everywhere. docs/language.md defines the order.
//
// Nothing here may be fused (-ffp-contract=off): only the product of two floats is exact in a double.
#pragma once

#include <cmath>

#include "math.hpp"

namespace kvdsl::ordered {

// As many neighbouring dims as are added side by side; a power of two.
struct Lanes {
  static constexpr int count = 32;
  double x[count];
};

// -0 becomes +0, so that the zeros behind the last dim change nothing.
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

// Every `step`-th of `size` dims, in pieces of Lanes::count, from `first` on: folded in half until one piece is left.
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

// The second half is added to the first, dim by dim, until one number is left; zeros make the dims a power of two.
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
