// Eviction from one KV head by scores and protections.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <vector>

#include "grade.hpp"
#include "view.hpp"

namespace kvdsl {

// One KV head in a settle: protect_*() mark protected slots, evict() frees the lowest-scored others.
class Head : public Slots {
 public:
  // Rows of `work_stride` integers that the workspace provides for grades.
  static constexpr int grade_rows = 3;

  // `before_placing`: make room for one more token, under a hard cap.
  Head(const Slots& slots_of, int32_t* positions, int32_t* rows, bool before_placing)
      : Slots(slots_of), places_(positions), grades_(rows), marks_(rows + work_stride),
        top_grades_(rows + 2 * work_stride), coming_(before_placing ? 1 : 0) {}

  // Returns how many tokens to evict: none until live - budget reaches trigger (0: never); then down to the budget, or
  // with max_drop at most that many at a time, but to no more than budget + slack. Before placing, the new token counts
  // as live, and tokens are evicted only beyond budget + slack.
  int overflow(int budget, int trigger = 1, int slack = 0, int max_drop = 0) const {
    const int held = live + coming_;
    const int most = slack < INT_MAX - budget ? budget + slack : INT_MAX;
    if (coming_ ? held <= most : trigger <= 0 || held - budget < trigger) return 0;
    if (max_drop <= 0) return held - budget;
    const int target = held - max_drop > budget ? held - max_drop : budget;
    return held - (target < most ? target : most);
  }

  void protect_first(int n) {
    if (n <= 0) return;
    const int last = n >= live ? INT_MAX : nth_position(n);
    first_ = last > first_ ? last : first_;
  }

  void protect_last(int n) {
    if (n <= 0) return;
    const int from = n >= live ? 0 : (n == 1 ? newest : nth_position(live - n + 1));
    last_ = from < last_ ? from : last_;
  }

  // Protects the n highest of x. x must not change before evict(), which computes grades as needed.
  void protect_top(const float* x, int n) {
    if (n <= 0) return;
    if (n >= live) return protect_where([](int) { return true; });
    if (tops_ == max_tops) resolve_tops();
    top_[tops_++] = {x, n};
  }

  template <class Condition>
  void protect_where(Condition&& condition) {
    clear_marks();
    const int32_t* const marks = marks_;
    fill(marks_, [=](int i) { return marks[i] | (condition(i) ? 1 : 0); });
  }

  // Pools over the text: at each unprotected slot, the maximum or mean of value over unprotected slots at most size / 2
  // places away; at others their own value. Call it after all protections.
  template <class Value>
  std::vector<float> max_pool(double size, Value&& value) {
    return pool(size, value, -INFINITY, [](float top, float x) { return maximum(top, x); }, false);
  }

  template <class Value>
  std::vector<float> mean_pool(double size, Value&& value) {
    return pool(size, value, 0.0f, [](float sum, float x) { return sum + x; }, true);
  }

  // Positions protected by first and last: up to kept_up_to(), and from kept_from() on.
  int kept_up_to() const { return first_; }
  int kept_from() const { return last_; }

  // Frees the n lowest-scored unprotected slots, then if needed protected ones by score, the newest token last; with
  // `ends_last`, those protected by first and last only when no others are left.
  void evict(const float* score, int n, bool ends_last = false);

 private:
  static constexpr int max_tops = 4;
  static constexpr int tries = 2;

  struct Top {
    const float* x;
    int n;
  };

  int32_t* places_;
  Grade* grades_;      // grades of the scores; above_all for a slot that is no candidate
  int32_t* marks_;   // 1 for a protected slot; valid after clear_marks()
  Grade* top_grades_;
  int coming_;  // 1 before a token is placed
  bool marked_ = false;
  int first_ = -1;       // positions up to this one are protected
  int last_ = INT_MAX;   // and from this one on
  Top top_[max_tops] = {};
  int tops_ = 0;

  // Loops over all slots. value() must capture by value, or the loop does not vectorize.
  template <class Value>
  int total(Value value) const {
    const int n = slots;
    int sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; ++i) sum += value(i);
    return sum;
  }

  template <class Value>
  int least(Value value) const {
    const int n = slots;
    int lowest = INT_MAX;
#pragma omp simd reduction(min : lowest)
    for (int i = 0; i < n; ++i) {
      const int x = value(i);
      lowest = x < lowest ? x : lowest;
    }
    return lowest;
  }

  template <class Value>
  void fill(int32_t* to, Value value) const {
    const int n = slots;
#pragma omp simd
    for (int i = 0; i < n; ++i) to[i] = value(i);
  }

  template <class Value, class Join>
  std::vector<float> pool(double size, Value&& value, float start, Join join, bool mean) {
    resolve_tops();
    std::vector<float> own(static_cast<std::size_t>(slots)), pooled;
    std::vector<int32_t> order;
    for (int i = 0; i < slots; ++i) {
      if (!visible(i)) continue;
      own[i] = value(i);
      const bool kept = position[i] <= first_ || position[i] >= last_ || (marked_ && marks_[i] != 0);
      if (!kept) order.push_back(i);
    }
    std::sort(order.begin(), order.end(), [&](int a, int b) { return position[a] < position[b]; });
    pooled = own;
    const int n = static_cast<int>(order.size()), least = size >= 1 ? kvdsl::count(size) : 1, radius = least / 2;
    for (int place = 0; place < n; ++place) {
      const int from = place > radius ? place - radius : 0, to = radius < n - place ? place + radius + 1 : n;
      float joined = start;
      for (int other = from; other < to; ++other) joined = join(joined, own[order[other]]);
      pooled[order[place]] = mean ? joined / static_cast<float>(to - from) : joined;
    }
    return pooled;
  }

  void clear_marks() {
    if (!marked_) fill(marks_, [](int) { return 0; });
    marked_ = true;
  }

  // Returns the n-th lowest live position. Tokens on one side of it are usually contiguous, which one count proves.
  int nth_position(int n) const;

  // Returns how many slots rank above slot `own` in x.
  int above(const float* x, int own) const;

  // The n-th lowest slot by (grade, position), found bit by bit with a count each.
  struct Cut {
    Grade grade;
    int position;
  };

  Cut nth(const Grade* grades, int n) const;

  // Converts protections by rank to marks.
  void resolve_tops();

  // Grades the unprotected slots.
  void grade_candidates(const float* score);

  // Grades all live slots, or all except those protected by first and last; the token at `newest_held` is highest.
  void grade_protected(const float* score, int newest_held, bool ends);

  // Returns the number of graded slots.
  int ranked() const;

  // Frees the n lowest-graded slots.
  void free_lowest(int n);

  // Returns the lowest-graded slot, the oldest among equals; -1 if there is none.
  int lowest() const;

  // Evicts one token, as in every step of the steady state: takes the lowest-scored slot, and if a rank protects it,
  // the next. Returns false after a few tries.
  bool free_one(const float* score);
};

}  // namespace kvdsl
