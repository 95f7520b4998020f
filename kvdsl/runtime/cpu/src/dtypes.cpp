// Operations of every dtype, see kvdsl/dtype.hpp.
#include <kvdsl/dtype.hpp>

#include "attend.hpp"
#include "pages.hpp"
#include "rotate.hpp"
#include "sketch.hpp"

namespace kvdsl {

namespace {

template <class T>
const float* as_floats(const void* row, int n, float* to) {
  if constexpr (std::is_same_v<T, float>) return static_cast<const float*>(row);
  const T* const from = static_cast<const T*>(row);
  if constexpr (std::is_same_v<T, bf16>) {
    for (int d = 0; d < n; ++d) to[d] = to_float(from[d]);
  } else if constexpr (std::is_same_v<T, f16>) {
    for (int d = 0; d < n; d += pair) {
      const Pair x = load_pair(from + d, n - d);
      store(to + d, x.a);
      store(to + d + width, x.b);
    }
  }
  return to;
}

template <class T>
float squares(const char* rows, int64_t apart, int count, int n) {
  Floats even{}, odd{};
  for (int i = 0; i < count; ++i) {
    const T* const row = reinterpret_cast<const T*>(rows + i * apart);
    for (int d = 0; d < n; d += pair) {
      const Pair x = load_pair(row + d, n - d);
      even += x.a * x.a;
      odd += x.b * x.b;
    }
  }
  return sum(even + odd);
}

template <class T>
void from_floats(const float* plain, float scale, int n, void* row) {
  for (int d = 0; d < n; ++d) static_cast<T*>(row)[d] = from_float<T>(plain[d] * scale);
}

template <class T>
constexpr Dtype of = {sizeof(T),
                      dot_block<T>,
                      add_block<T>,
                      read_row<T>,
                      as_floats<T>,
                      squares<T>,
                      from_floats<T>,
                      pack_row<T>,
                      turn_rows<T>,
                      turn_quarter<T>,
                      write_row<T>,
                      {put_in_tile<T>, fill_tile<T>, dot_tile<T>},
                      {bound_key<T>, bound_scores<T>}};

template <class T>
constexpr Stored stored_as = {std::is_same_v<T, Int4>, stored_bytes<T>, dot_block<T>, add_block<T>, pack_stored<T>, unpack_row<T>};

}  // namespace

const Stored stored[3] = {stored_as<Int8>, stored_as<Int4>, stored_as<Float8>};

const Dtype float32 = of<float>, bfloat16 = of<bf16>, float16 = of<f16>;

}  // namespace kvdsl
