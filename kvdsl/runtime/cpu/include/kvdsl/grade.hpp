// Grades: integers in the order of floats, for vectorized comparisons and bisection by bits. -0 equals +0, NaN is
// lowest. Among equal grades the newer slot ranks higher.
#pragma once

#include <climits>
#include <cstdint>

#include "types.hpp"

namespace kvdsl {

using Grade = int32_t;
constexpr Grade below_all = INT_MIN;       // a slot that does not count, at the lower end
constexpr Grade above_all = INT_MAX;       // and at the upper end
constexpr Grade nan_grade = INT_MIN + 1;

inline Grade grade(float x) {
  const int32_t bits = bit_cast<int32_t>(x + 0.0f);  // turns -0 into +0
  const int32_t ordered = bits ^ ((bits >> 31) & INT_MAX);
  return x != x ? nan_grade : ordered;
}

}  // namespace kvdsl
