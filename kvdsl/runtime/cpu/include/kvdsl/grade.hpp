// Grades: integers in the order of floats, which vectorise and can be bisected bit by bit. -0 equals +0, NaN is below everything. Of slots with
// equal grades the newer one is above.
#pragma once

#include <climits>
#include <cstdint>

#include "types.hpp"

namespace kvdsl {

using Grade = int32_t;
constexpr Grade below_all = INT_MIN;       // a slot that does not count
constexpr Grade above_all = INT_MAX;       // likewise, at the other end
constexpr Grade nan_grade = INT_MIN + 1;

inline Grade grade(float x) {
  const int32_t bits = bit_cast<int32_t>(x + 0.0f);  // turns -0 into +0
  const int32_t ordered = bits ^ ((bits >> 31) & INT_MAX);
  return x != x ? nan_grade : ordered;
}

}  // namespace kvdsl
