// Who leaves a KV head, once its slots are scored: what is protected stays, of the others the lowest-scored leave.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <vector>

#include "grade.hpp"
#include "view.hpp"

namespace kvdsl {

// One head at the end of a step: protect_*() name what may not leave, evict() frees the lowest-scored of the others.
class Head : public Slots {
 public:
  // The workspace for grades: `grade_rows` rows of `work_stride` integers.
  static constexpr int grade_rows = 3;

  // `before_placing`: under a hard cap, room is made for one more token.
  Head(const Slots& slots_of, int32_t* positions, int32_t* rows, bool before_placing)
      : Slots(slots_of), places_(positions), grades_(rows), marks_(rows + work_stride),
        top_grades_(rows + 2 * work_stride), coming_(before_placing ? 1 : 0) {}

  // How many tokens must leave: none before live - budget reaches trigger (0: never), then down to the budget, or
  // with max_drop by so many at a time, to no more than budget + slack. Before a token is placed, it counts as live, and
  // any must leave only if it exceeds budget + slack.
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

  // The n highest of x, which must stay as it is until evict(): grades are only worked out as far as they matter.
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

  // At every slot that may leave the largest, or the mean, value(i) of those at most size / 2 places before or behind, in the order of
  // the text; at the others their own. Behind all that protects.
  template <class Value>
  std::vector<float> max_pool(double size, Value&& value) {
    return pool(size, value, -INFINITY, [](float top, float x) { return maximum(top, x); }, false);
  }

  template <class Value>
  std::vector<float> mean_pool(double size, Value&& value) {
    return pool(size, value, 0.0f, [](float sum, float x) { return sum + x; }, true);
  }

  // What first and last protect: positions up to the one and from the other on.
  int kept_up_to() const { return first_; }
  int kept_from() const { return last_; }

  // Frees the n lowest-scored unprotected slots. If there are fewer, all of those leave and then the lowest-scored
  // protected ones, the newest token last; with `ends_last` those that first and last protect only when no others are left.
  void evict(const float* score, int n, bool ends_last = false);

 private:
  static constexpr int max_tops = 4;
  static constexpr int tries = 2;

  struct Top {
    const float* x;
    int n;
  };

  int32_t* places_;  // position, writable
  Grade* grades_;      // the scores' grades; above_all where a slot is no candidate
  int32_t* marks_;   // 1 where protected; not valid before clear_marks()
  Grade* top_grades_;
  int coming_;  // 1 before a token is placed
  bool marked_ = false;
  int first_ = -1;       // positions up to this one are protected
  int last_ = INT_MAX;   // and from this one on
  Top top_[max_tops] = {};
  int tops_ = 0;

  // Loops over all slots; what value() reads it must capture by value, else the loop does not vectorise.
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

  // The n-th lowest position that is held. Mostly the tokens on one side of it are contiguous, which one count proves.
  int nth_position(int n) const;

  // How many slots rank above slot `own` in x.
  int above(const float* x, int own) const;

  // The n-th lowest slot in the order (grade, position), as that pair: bit by bit, a count for each.
  struct Cut {
    Grade grade;
    int position;
  };

  Cut nth(const Grade* grades, int n) const;

  // Turns the protections by grade into marks.
  void resolve_tops();

  // Ranks the slots that may leave.
  void grade_candidates(const float* score);

  // Ranks all that is still held, or all but what first and last protect, the token at position `newest_held` above the rest.
  void grade_protected(const float* score, int newest_held, bool ends);

  // How many slots are ranked.
  int ranked() const;

  // Frees the n lowest-ranked slots.
  void free_lowest(int n);

  // The lowest-ranked slot, of equals the oldest; -1 if nothing is ranked.
  int lowest() const;

  // One victim, as in every step of the steady state: take the lowest-scored slot and count how many rank above it
  // where tops are protected; while it proves protected, take the next. False if it is not found in a few tries.
  bool free_one(const float* score);
};

}  // namespace kvdsl
