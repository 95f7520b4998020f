// The interface of a policy for one KV head. A policy is a struct of static functions, which the driver
// (src/decode.cpp) calls:
//
//   place(Slot&)     when a token enters: fill in the columns that depend on it alone
//   observe(Query&)  after each real query: update the columns
//   settle(Head&)    after that: score slots, protect some, evict
//
// Loops over slots run from 0 to `slots` and select by visible(i) (in settle: whether the slot is live), so that they
// vectorize. Numbers of free slots are arbitrary. Arithmetic is float.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>
#include <vector>

#include "args.hpp"
#include "grade.hpp"
#include "layout.hpp"
#include "math.hpp"
#include "ordered.hpp"
#include "random.hpp"
#include "types.hpp"

namespace kvdsl {

// How query heads of a group are reduced; `each`: not at all, every head selects for itself.
enum class Group { mean, max, sum, each };

// What ranks slots for selection: nothing (attend to all), the policy's expression, or one with a fast form: query
// times key, the same over the sketch's dims, or its upper bound over a page.
enum class By { all, expression, dot, sketch_dot, page_bound };

// How votes of a layer's KV heads are reduced, where they select together.
enum class Vote { none, sum, mean, max, min };

// Defaults: a policy derives from this and overrides what it needs.
struct Slot;
struct Slots;
struct Query;
class Head;
struct Policy {
  static constexpr int columns = 0;            // float32 state columns
  static constexpr int scratch_columns = 0;    // work rows of `slots` floats
  static constexpr Group group = Group::mean;
  static constexpr bool needs_attn = false;
  static constexpr bool needs_logit = false;
  static constexpr bool forgets = false;       // only a prompt's queries are observed
  static constexpr bool prefill_only = false;  // evict at the end of a prompt only
  static constexpr bool hard_cap = false;      // make room before a token is placed
  static constexpr bool settle_reads_keys = false;  // or values: settle is a template over HeadOf's dtype
  static void place(const Slot&) {}
  static void observe(const Query&) {}
  static void settle(Head&) {}

  // For policies that select; see select.hpp.
  static constexpr By by = By::all;
  static constexpr bool choice_reads_rows = false;  // whether a function below reads cached keys or values
  static int tokens(const Slots&) { return INT_MAX; }       // how many slots to attend to; or a template over QueryOf's dtype
  static int page(const Slots&) { return 0; }               // tokens per page, 0 without pages
  static int page_after(const Slots&) { return 0; }         // tokens before the first page
  static int sketch_every(const Slots&) { return INT_MAX; }  // queries between two choices of the sketch
  static void always(Head&) {}                              // protect slots that are always selected
  static void expression(const Query&, float*) {}           // rank of every slot
  static constexpr bool alone = false;                      // expression is per query head
  static constexpr Vote vote = Vote::none;                  // expression is the vote of a KV head
  static void with_vote(const Query&, const float*, float*) {}  // rank by the vote, unless the vote is the rank
  static void sketch(const Query&, float*) {}               // rank of every dim for the sketch
};

// Floors a number to a count of tokens, at least 0.
inline int count(double x) {
  if (!(x >= 1)) return 0;
  return x < INT_MAX ? static_cast<int>(x) : INT_MAX;
}

// Floors a count that depends on the data, at least 1; NaN becomes 1.
inline double at_least_one(double x) { return x >= 1 ? std::floor(x) : 1.0; }

// The policy's tensors for a head: rows of key_dim. A tensor without dims repeats its number.
struct Constants {
  const float* rows;
  int64_t stride;

  float operator()(int tensor, int d = 0) const { return rows[tensor * stride + d]; }
};

// Per-token values from the caller.
struct Supplied {
  const float* values;
  int64_t stride;

  double operator()(int i) const { return values[i * stride]; }
};

// A token that enters the cache. Its columns are 0.
struct Slot {
  int index;
  int position;
  const float* key;    // [key_dim]
  const float* value;  // [value_dim]
  int key_dim;
  int value_dim;
  float* state;
  int64_t column_stride;
  const double* params;
  Constants constant;
  Supplied given;

  double param(int i) const { return params[i]; }
  double k(int d) const { return key[d]; }
  double v(int d) const { return value[d]; }
  float& column(int c) const { return state[c * column_stride + index]; }
};

// Pages of the visible slots, numbered in text order.
struct Pages {
  std::vector<int32_t> of;     // [slots] the number of the slot's page; 0 if not visible
  std::vector<int32_t> place;  // [pages] the page's index in the text
  std::vector<int32_t> held;   // [pages] visible slots in the page

  // Returns the number of the next page of the text, -1 if no slot is in it.
  int next(int i) const {
    const std::size_t behind = static_cast<std::size_t>(of[i]) + 1;
    return behind < place.size() && place[behind] == place[of[i]] + 1 ? of[i] + 1 : -1;
  }
};

// Dot products of every slot's vector with other slots' vectors.
struct Pairs {
  std::vector<float> own, other;  // [slots, dims]
  int dims;

  float operator()(int i, int o) const { return product(own.data() + int64_t{i} * dims, other.data() + int64_t{o} * dims, dims); }

 private:
  // Not inlined: otherwise GCC vectorizes no loop over pairs of slots.
  [[gnu::noinline]] static float product(const float* a, const float* b, int dims) {
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int d = 0; d < dims; ++d) total += a[d] * b[d];
    return total;
  }
};

// The slots of a head, and reductions over visible ones. Base of queries and heads.
struct Slots {
  int slots;
  const int32_t* position;  // -1 where free
  int newest;               // the newest token's position
  int oldest;               // the lowest visible position; 0 without a window
  int window;               // how many queries see a token, 0 = all
  int live;                 // live tokens; in a settle, before eviction
  float* state;
  const int32_t* ring_rows;
  int since;            // the first query that counts in rings
  int64_t column_stride;
  float* work;
  int64_t work_stride;
  const double* params;
  Constants constant;
  uint32_t random_key;  // the hash of seed, layer and head
  int key_dim;
  int value_dim;
  Layout keys;    // rows of key_dim in the model's dtype; unset at the end of a prompt
  Layout values;  // rows of value_dim

  bool visible(int i) const { return position[i] >= oldest; }
  int age(int i) const { return newest - position[i]; }
  // Returns how many queries could see the slot, its own token's included.
  float observed(int i) const {
    const int seen = age(i) + 1;
    return static_cast<float>(window > 0 && seen > window ? window : seen);
  }
  float random(int i) const { return to_unit(absorb(absorb(random_key, position[i]), newest)); }
  double param(int i) const { return params[i]; }
  float* column(int c) const { return state + c * column_stride; }
  float* scratch(int c) const { return work + c * work_stride; }

  // A ring holds values of the newest `size` queries; the query at position p has row p % size. Returns the newest
  // query's row.
  float* ring(int r, int size) const { return ring_row(r, size, newest); }

  // Reduce a ring over the newest `size` queries that could see the slot, into to[slots], and return it. If there are
  // none (behind the window), the sum is 0 and the mean NaN.
  const float* ring_sum(int r, int size, float* to) const {
    return fold_ring(r, size, 0.0f, to, [](float total, float x, int) { return total + x; });
  }

  const float* ring_mean(int r, int size, float* to) const {
    ring_sum(r, size, to);
    return divide_by_queries(size, to);
  }

  // Two passes avoid cancellation.
  const float* ring_var(int r, int size, const float* means, float* to) const {
    fold_ring(r, size, 0.0f, to, [=](float total, float x, int i) { return total + square(x - means[i]); });
    return divide_by_queries(size, to);
  }

  const float* ring_std(int r, int size, const float* means, float* to) const {
    ring_var(r, size, means, to);
#pragma omp simd
    for (int i = 0; i < slots; ++i) to[i] = std::sqrt(to[i]);
    return to;
  }

  const float* ring_max(int r, int size, float* to) const {
    return fold_ring(r, size, -INFINITY, to, [](float top, float x, int) { return maximum(top, x); });
  }

  const float* ring_min(int r, int size, float* to) const {
    return fold_ring(r, size, INFINITY, to, [](float least, float x, int) { return minimum(least, x); });
  }

  // Reductions of value(i) over visible slots; there is at least one.
  int count() const {
    int n = 0;
#pragma omp simd reduction(+ : n)
    for (int i = 0; i < slots; ++i) n += visible(i);
    return n;
  }

  // The type of value(i) decides between float and double.
  template <class Value>
  auto sum(Value&& value) const {
    using X = decltype(value(0));
    X total = 0;
#pragma omp simd reduction(+ : total)
    for (int i = 0; i < slots; ++i) total += visible(i) ? value(i) : X{0};
    return total;
  }

  template <class Value>
  auto mean(Value&& value) const {
    return sum(value) / static_cast<decltype(value(0))>(count());
  }

  // Two passes avoid cancellation.
  template <class Value>
  auto var(Value&& value) const {
    const auto centre = mean(value);
    return mean([&](int i) { return (value(i) - centre) * (value(i) - centre); });
  }

  template <class Value>
  auto std(Value&& value) const {
    return std::sqrt(var(value));
  }

  // NaN if a visible value is NaN.
  template <class Value>
  auto max(Value&& value) const {
    using X = decltype(value(0));
    constexpr X none = -std::numeric_limits<X>::infinity();
    X top = none;
    int nans = 0;
#pragma omp simd reduction(max : top) reduction(+ : nans)
    for (int i = 0; i < slots; ++i) {
      const X x = visible(i) ? value(i) : none;
      nans += x != x;
      top = x > top ? x : top;
    }
    return nans ? std::numeric_limits<X>::quiet_NaN() : top;
  }

  template <class Value>
  auto min(Value&& value) const {
    return -max([&](int i) { return -value(i); });
  }

  // Reductions of value(i, d) per dim, and per page if given. Row by row, in the order of keys in memory.
  template <class Value>
  std::vector<float> sum_of_dims(int dims, Value&& value, const Pages* pages = nullptr) const {
    return fold_dims(dims, 0.0f, pages, [&](float total, int i, int d) { return total + value(i, d); });
  }

  template <class Value>
  std::vector<float> mean_of_dims(int dims, Value&& value, const Pages* pages = nullptr) const {
    std::vector<float> means = sum_of_dims(dims, value, pages);
    const int all = pages ? 0 : count();
    for (std::size_t n = 0; n < means.size(); ++n) means[n] /= static_cast<float>(pages ? pages->held[n / dims] : all);
    return means;
  }

  template <class Value>
  std::vector<float> var_of_dims(int dims, Value&& value, const Pages* pages = nullptr) const {
    const std::vector<float> centre = mean_of_dims(dims, value, pages);
    const auto at = [&](int i, int d) { return (pages ? pages->of[i] * dims : 0) + d; };
    return mean_of_dims(dims, [&](int i, int d) { return square(value(i, d) - centre[at(i, d)]); }, pages);
  }

  template <class Value>
  std::vector<float> std_of_dims(int dims, Value&& value, const Pages* pages = nullptr) const {
    std::vector<float> deviations = var_of_dims(dims, value, pages);
    for (float& deviation : deviations) deviation = std::sqrt(deviation);
    return deviations;
  }

  template <class Value>
  std::vector<float> max_of_dims(int dims, Value&& value, const Pages* pages = nullptr) const {
    return fold_dims(dims, -INFINITY, pages, [&](float top, int i, int d) { return maximum(top, value(i, d)); });
  }

  template <class Value>
  std::vector<float> min_of_dims(int dims, Value&& value, const Pages* pages = nullptr) const {
    return fold_dims(dims, INFINITY, pages, [&](float least, int i, int d) { return minimum(least, value(i, d)); });
  }

  // Returns the pages of `size` tokens; the first begins behind `after` tokens.
  Pages pages(int size, int after) const {
    const auto page = [&](int i) {
      const int behind = position[i] - after;
      return behind >= 0 ? behind / size : -1 - (-1 - behind) / size;
    };
    Pages found{std::vector<int32_t>(static_cast<std::size_t>(slots)), {}, {}};
    for (int i = 0; i < slots; ++i) {
      if (visible(i) && (found.place.empty() || found.place.back() != page(i))) found.place.push_back(page(i));
    }
    std::sort(found.place.begin(), found.place.end());
    found.place.erase(std::unique(found.place.begin(), found.place.end()), found.place.end());
    found.held.resize(found.place.size());
    for (int i = 0; i < slots; ++i) {
      if (!visible(i)) continue;
      const auto at = std::lower_bound(found.place.begin(), found.place.end(), page(i)) - found.place.begin();
      ++found.held[at];
      found.of[i] = static_cast<int32_t>(at);
    }
    return found;
  }

  // Returns value(i, d) of every visible slot.
  template <class Value>
  std::vector<float> each(int dims, Value&& value) const {
    std::vector<float> found(static_cast<std::size_t>(slots) * dims);
    for (int i = 0; i < slots; ++i) {
      for (int d = 0; d < dims && visible(i); ++d) found[int64_t{i} * dims + d] = value(i, d);
    }
    return found;
  }

  template <class Own, class Other>
  Pairs products(int dims, Own&& own, Other&& other) const {
    return Pairs{each(dims, own), each(dims, other), dims};
  }

  // Reductions for every visible slot i of value(i, o, d) over the other visible slots o, or with `itself` over all;
  // per dim.
  template <class Value>
  std::vector<float> sum_of_others(int dims, bool itself, Value&& value) const {
    return fold_others(dims, itself, 0.0f, [&](float total, int i, int o, int d) { return total + value(i, o, d); });
  }

  template <class Value>
  std::vector<float> mean_of_others(int dims, bool itself, Value&& value) const {
    std::vector<float> means = sum_of_others(dims, itself, value);
    const float others = static_cast<float>(count() - (itself ? 0 : 1));
    for (float& mean : means) mean /= others;
    return means;
  }

  template <class Value>
  std::vector<float> max_of_others(int dims, bool itself, Value&& value) const {
    return fold_others(dims, itself, -INFINITY, [&](float top, int i, int o, int d) { return maximum(top, value(i, o, d)); });
  }

  template <class Value>
  std::vector<float> min_of_others(int dims, bool itself, Value&& value) const {
    return fold_others(dims, itself, INFINITY, [&](float least, int i, int o, int d) { return minimum(least, value(i, o, d)); });
  }

  // Returns how many visible slots, by descending by(i), reach `share` of the sum of value.
  template <class Value, class By>
  double enough(Value&& value, double share, By&& by) const {
    const std::vector<int32_t> order = ordered(by, [](int) { return 0; });
    double total = 0, sum = 0;
    for (auto i = order.rbegin(); i != order.rend(); ++i) total += value(*i);
    int taken = 0;
    for (auto i = order.rbegin(); i != order.rend() && (taken == 0 || !(sum >= share * total)); ++i, ++taken) sum += value(*i);
    return taken;
  }

  // Returns how many visible slots, in its page if given, rank lower than each by value.
  template <class Value>
  std::vector<float> rank(Value&& value, const Pages* pages = nullptr) const {
    const auto page = [=](int i) { return pages ? pages->of[i] : 0; };
    const std::vector<int32_t> order = ordered(value, page);
    std::vector<float> places(static_cast<std::size_t>(slots));
    for (std::size_t n = 0, first = 0; n < order.size(); ++n) {
      if (page(order[n]) != page(order[first])) first = n;
      places[order[n]] = static_cast<float>(n - first);
    }
    return places;
  }

 private:
  template <class Fold>
  std::vector<float> fold_others(int dims, bool itself, float start, Fold&& fold) const {
    std::vector<float> folded(static_cast<std::size_t>(slots) * dims, start);
    for (int i = 0; i < slots; ++i) {
      float* const to = folded.data() + int64_t{i} * dims;
      for (int o = 0; o < slots && visible(i); ++o) {
        if (!visible(o) || (o == i && !itself)) continue;
        for (int d = 0; d < dims; ++d) to[d] = fold(to[d], i, o, d);
      }
    }
    return folded;
  }

  // Returns the visible slots by page, then value(i), then age.
  template <class Value, class Page>
  std::vector<int32_t> ordered(Value&& value, Page&& page) const {
    std::vector<Grade> grades(static_cast<std::size_t>(slots));
    std::vector<int32_t> order;
    for (int i = 0; i < slots; ++i) {
      if (!visible(i)) continue;
      grades[i] = grade(value(i));
      order.push_back(i);
    }
    std::sort(order.begin(), order.end(), [&](int a, int b) {
      return std::make_tuple(page(a), grades[a], position[a]) < std::make_tuple(page(b), grades[b], position[b]);
    });
    return order;
  }

  template <class Fold>
  std::vector<float> fold_dims(int dims, float start, const Pages* pages, Fold&& fold) const {
    std::vector<float> folded(static_cast<std::size_t>(dims) * (pages ? pages->place.size() : 1), start);
    for (int i = 0; i < slots; ++i) {
      if (!visible(i)) continue;
      float* const to = folded.data() + (pages ? int64_t{pages->of[i]} * dims : 0);
#pragma omp simd
      for (int d = 0; d < dims; ++d) to[d] = fold(to[d], i, d);
    }
    return folded;
  }

  float* ring_row(int r, int size, int query) const { return column(ring_rows[r] + query % size); }

  // Row by row, so that the loop over slots vectorizes.
  template <class Fold>
  const float* fold_ring(int r, int size, float start, float* to, Fold fold) const {
    const int32_t* const at = position;
    const int n = slots;
    for (int i = 0; i < n; ++i) to[i] = start;
    for (int query = first_of_ring(size); query <= newest; ++query) {
      const float* const x = ring_row(r, size, query);
      const int first = window > 0 ? query - window + 1 : 0;
#pragma omp simd
      for (int i = 0; i < n; ++i) to[i] = (at[i] >= first) & (at[i] <= query) ? fold(to[i], x[i], i) : to[i];
    }
    return to;
  }

  int first_of_ring(int size) const { return newest - size + 1 > since ? newest - size + 1 : since; }

  // Divides by how many of the newest `size` queries could see the slot.
  const float* divide_by_queries(int size, float* to) const {
    const int32_t* const at = position;
    const int n = slots, first = first_of_ring(size), reach = window > 0 ? window - 1 : newest;
#pragma omp simd
    for (int i = 0; i < n; ++i) {
      const int from = at[i] > first ? at[i] : first;
      const int to_query = at[i] + reach < newest ? at[i] + reach : newest;
      to[i] /= static_cast<float>(to_query >= from ? to_query - from + 1 : 0);
    }
    return to;
  }
};

// Reduces value(g) over the query heads of a group.
template <Group how, class Value>
inline auto over_group(int group, Value&& value) {
  auto result = value(0);
  for (int g = 1; g < group; ++g) result = how == Group::max ? maximum(result, value(g)) : result + value(g);
  return how == Group::mean ? result / static_cast<decltype(result)>(group) : result;
}

// A query after attention. visible(i) tells which slots it sees.
struct Query : Slots {
  const float* attn;   // [slots] probabilities reduced over the group, if Policy::needs_attn
  const float* logit;  // [slots] logits reduced over the group, if Policy::needs_logit
  const float* query;  // [group, key_dim], unscaled
  int group;
  int query_head;      // index of the first one in the layer
  const int32_t* sketch;  // [dims] dims of the sketch, ascending, if there is one
  int dims;

  float q(int g, int d) const { return query[g * key_dim + d]; }

  // Keeps only query head g.
  void leave(int g) {
    query += int64_t{g} * key_dim;
    query_head += g;
    group = 1;
  }
};

// Returns the query of head g alone.
template <class Row>
Row alone(const Row& row, int g) {
  Row own = row;
  own.leave(g);
  return own;
}

// Adds cached keys and values, for a policy that reads them.
template <class T, class Seen>
struct Typed : Seen {
  float k(int i, int d) const { return to_float(reinterpret_cast<const T*>(this->keys.row(i))[d]); }
  float v(int i, int d) const { return to_float(reinterpret_cast<const T*>(this->values.row(i))[d]); }
};

template <class T>
using QueryOf = Typed<T, Query>;

template <class T>
using HeadOf = Typed<T, Head>;

}  // namespace kvdsl
