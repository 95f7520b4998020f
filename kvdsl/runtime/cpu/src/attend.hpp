// The two kernels that stream over the cache: keys to scores, and values to weighted sums.
//
// They take pointers to rows, so that a free slot can point at zeros and whatever an evicted token left (perhaps NaN)
// is never read. They serve several query heads per row, because heads of a group share keys and values and decode is
// bound by memory.
#pragma once

#include <cmath>
#include <type_traits>

#include <kvdsl/view.hpp>

#include "packed.hpp"
#include "rotate.hpp"
#include "simd.hpp"

namespace kvdsl {

// Rows per block. A block stays in the L1 cache while all heads process it.
constexpr int block = 32;
// Rows read at once. Memory access is nearly linear, which the hardware prefetcher can follow.
constexpr int rows_at_once = registers == 32 ? 4 : 2;
// Prefetch distance in bytes, in strictly rising order: in the order of the loads themselves (row by row at one d),
// reads are a fifth slower. Prefetching beyond the last row never faults.
constexpr int ahead = 8192;

// Where to prefetch, for every rows_at_once rows of a block.
struct Next {
  const void* row[block / rows_at_once];
};

// Prefetch addresses that many bytes ahead, skipping the `free` unread rows behind slot `end`; the next head follows.
// With a block table, as many slots ahead, at most the last one.
inline void find_next(const Layout& layout, int from, int end, int free, Next& next) {
  const int far = static_cast<int>(ahead / layout.row_bytes);
  for (int i = 0; i < block / rows_at_once; ++i) {
    const int slot = from + i * rows_at_once;
    if (layout.table) {
      next.row[i] = layout.row(slot + far < end ? slot + far : end - 1);
    } else {
      const int64_t at = slot * layout.row_bytes + ahead;
      next.row[i] = layout.base + at + (at < end * layout.row_bytes ? 0 : free * layout.row_bytes);
    }
  }
}

// Prefetches the share of head g, of `Heads`, at d.
template <int Heads, class T>
inline void fetch(const void* next, int d, int g) {
  constexpr int bits = rows_at_once * pair * bits_of<T>;
  constexpr bool slow = bits < 512 && is_packed<T>;  // a cache line lasts for several d
  constexpr int lines = slow ? 1 : bits / 512, share = (lines + Heads - 1) / Heads;
  if (slow && d % (pair * (512 / bits)) != 0) return;
  const char* const from = static_cast<const char*>(next) + rows_at_once * d * bits_of<T> / 8;
  for (int i = g * share; i < (g + 1) * share && i < lines; ++i) __builtin_prefetch(from + i * 64);
}

// scores[g][r] = q[g] . rows[r] for rows_at_once rows. q is in pairs, padded with zeros.
template <class T, int Heads>
inline void dot_rows(const float* q, int64_t q_stride, const void* const* rows, const void* next, int dim,
                     float* scores, int64_t scores_stride) {
  constexpr int n = rows_at_once;
  Floats sum[Heads * n] = {};
  for (int d = 0; d < dim; d += pair) {
    Pair k[n];
    if (d + pair <= dim) unrolled<n>([&](auto r) { k[r] = load_whole<T>(rows[r], d, dim); });
    else unrolled<n>([&](auto r) { k[r] = load_part<T>(rows[r], d, dim); });
    unrolled<Heads>([&](auto g) {
      fetch<Heads, T>(next, d, g);
      const Floats a = once(load(q + g * q_stride + d)), b = once(load(q + g * q_stride + d + width));
      unrolled<n>([&](auto r) { sum[g * n + r] += a * k[r].a; });
      unrolled<n>([&](auto r) { sum[g * n + r] += b * k[r].b; });
    });
  }
  float totals[Heads * n];
  sums<Heads * n>(sum, totals);
  for (int r = 0; has_row_scale<T> && r < n; ++r) {
    const float scale = row_scale<T>(rows[r], dim);
    for (int g = 0; g < Heads; ++g) totals[g * n + r] *= scale;
  }
  for (int g = 0; g < Heads; ++g) {
    for (int r = 0; r < n; ++r) scores[g * scores_stride + r] = totals[g * n + r];
  }
}

// out[g] += sum over rows_at_once rows of weights[g][r] * rows[r]; out is in pairs.
template <class T, int Heads>
inline void add_rows(const float* weights, int64_t weights_stride, const void* const* rows, const void* next, int dim,
                     float* out, int64_t out_stride) {
  constexpr int n = rows_at_once;
  Floats weight[Heads][n];
  for (int g = 0; g < Heads; ++g) {
    for (int r = 0; r < n; ++r) {
      float own = weights[g * weights_stride + r];
      if constexpr (has_row_scale<T>) own *= row_scale<T>(rows[r], dim);
      weight[g][r] = once(splat(own));
    }
  }
  for (int d = 0; d < dim; d += pair) {
    Pair v[n];
    if (d + pair <= dim) {
      for (int r = 0; r < n; ++r) v[r] = load_whole<T>(rows[r], d, dim);
    } else {
      for (int r = 0; r < n; ++r) v[r] = load_part<T>(rows[r], d, dim);
    }
    for (int g = 0; g < Heads; ++g) {
      fetch<Heads, T>(next, d, g);
      float* const to = out + g * out_stride + d;
      Floats a = load(to), b = load(to + width);
      for (int r = 0; r < n; ++r) {
        a += weight[g][r] * v[r].a;
        b += weight[g][r] * v[r].b;
      }
      store(to, a);
      store(to + width, b);
    }
  }
}

// Calls body(first head, number of heads as a constant) until all heads of the group are served.
template <class Body>
inline void for_heads(int group, Body&& body) {
  int g = 0;
  for (; g + 4 <= group; g += 4) body(g, std::integral_constant<int, 4>{});
  if (group - g == 3) body(g, std::integral_constant<int, 3>{});
  if (group - g == 2) body(g, std::integral_constant<int, 2>{});
  if (group - g == 1) body(g, std::integral_constant<int, 1>{});
}

template <class T>
void dot_block(const float* q, int64_t q_stride, int group, const void* const* rows, const Next* next, int dim,
               float* scores, int64_t scores_stride) {
  for_heads(group, [&](int g, auto heads) {
    for (int r = 0; r < block; r += rows_at_once) {
      dot_rows<T, heads()>(q + g * q_stride, q_stride, rows + r, g == 0 && next ? next->row[r / rows_at_once] : rows[r], dim,
                           scores + g * scores_stride + r, scores_stride);
    }
  });
}

template <class T>
void add_block(const float* weights, int64_t weights_stride, int group, const void* const* rows, const Next* next,
               int dim, float* out, int64_t out_stride) {
  for_heads(group, [&](int g, auto heads) {
    for (int r = 0; r < block; r += rows_at_once) {
      add_rows<T, heads()>(weights + g * weights_stride + r, weights_stride, rows + r,
                           g == 0 && next ? next->row[r / rows_at_once] : rows[r], dim, out + g * out_stride, out_stride);
    }
  });
}

template <class T>
void read_row(const void* row, int n, float* plain, float* pairs) {
  const T* const from = static_cast<const T*>(row);
  for (int d = 0; d < n; d += pair) {
    const Pair x = load_pair(from + d, n - d);
    store(pairs + d, x.a);
    store(pairs + d + width, x.b);
  }
  for (int d = 0; d < n; ++d) plain[d] = pairs[place_of<T>(d)];
}

template <class T>
void pack_row(const float* plain, int n, float* pairs) {
  std::memset(pairs, 0, sizeof(float) * static_cast<std::size_t>((n + pair - 1) / pair * pair));
  for (int d = 0; d < n; ++d) pairs[place_of<T>(d)] = plain[d];
}

template <class T>
void write_row(const float* pairs, float scale, int n, void* row) {
  T* const to = static_cast<T*>(row);
  for (int d = 0; d < n; ++d) to[d] = from_float<T>(pairs[place_of<T>(d)] * scale);
}

// Turns products into logits: scale, softcap, ALiBi, -inf for invisible slots. Returns the maximum of them and top.
//
// distance: places between slot and query, or null.
[[gnu::noinline]] inline float finish_scores(float* scores, const int32_t* visible, float scale, float softcap, float slope,
                                             const float* distance, float top) {
  Floats tops = splat(top);
  for (int i = 0; i < block; i += width) {
    Floats x = load(scores + i) * scale;
    if (softcap > 0) x = softcap * tanh(x / softcap);
    if (distance) x = x - slope * load(distance + i);
    x = load_as<Ints>(visible + i) != 0 ? x : splat(-INFINITY);
    store(scores + i, x);
    tops = max(x, tops);
  }
  return max(tops);
}

// x = e^(x - top) for whole blocks of logits; returns the sum.
[[gnu::noinline]] inline float exponentiate(float* scores, int n, float top) {
  Floats total{};
  for (int i = 0; i < n; i += width) {
    const Floats e = exp(load(scores + i) - top);
    store(scores + i, e);
    total += e;
  }
  return sum(total);
}

// to[i] = mean, maximum or sum over the group's heads of rows[g][i] * factors[g].
template <Group how>
void reduce_group(const float* rows, int64_t stride, int group, const float* factors, int from, int to, float* reduced) {
  const float count = how == Group::mean ? static_cast<float>(group) : 1.0f;
  for (int i = from; i < to; i += width) {
    Floats x = load(rows + i) * factors[0];
    for (int g = 1; g < group; ++g) {
      const Floats other = load(rows + g * stride + i) * factors[g];
      x = how == Group::max ? (other > x || other != other ? other : x) : x + other;
    }
    store(reduced + i, x / count);
  }
}

using Reduce = void (*)(const float* rows, int64_t stride, int group, const float* factors, int from, int to, float* reduced);

inline Reduce reduction(Group how) {
  return how == Group::max ? reduce_group<Group::max> : how == Group::mean ? reduce_group<Group::mean> : reduce_group<Group::sum>;
}

}  // namespace kvdsl
