// Eviction from a head: finds victims by counting, without sorting.
#include <kvdsl/head.hpp>

#include <climits>
#include <cstdint>

namespace kvdsl {

void Head::evict(const float* score, int n, bool ends_last) {
  n = n < live ? n : live;
  if (n <= 0) return;
  if (n == 1 && free_one(score)) return;
  resolve_tops();
  grade_candidates(score);
  const int candidates = ranked();
  if (candidates >= n) return free_lowest(n);
  const int32_t* const at = position;
  const int newest_held = -least([=](int i) { return -at[i]; });  // the row's newest token may be evicted already
  if (candidates > 0) free_lowest(candidates);
  n -= candidates;
  if (ends_last) {
    grade_protected(score, newest_held, false);
    const int others = ranked() < n ? ranked() : n;
    if (others > 0) free_lowest(others);
    n -= others;
  }
  if (n == 0) return;
  grade_protected(score, newest_held, true);
  free_lowest(n);
}

int Head::ranked() const {
  const Grade* const grades = grades_;
  return total([=](int i) { return grades[i] != above_all; });
}

int Head::nth_position(int n) const {
  const int32_t* const at = position;
  const auto at_most = [=](int p) { return total([=](int i) { return (at[i] >= 0) & (at[i] <= p); }); };
  int low = n - 1, high = newest - (live - n);  // it lies here
  if (at_most(low) == n) return low;
  if (at_most(high - 1) < n) return high;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (at_most(middle) >= n) high = middle;
    else low = middle + 1;
  }
  return low;
}

int Head::above(const float* x, int own) const {
  const int32_t* const at = position;
  const Grade bar = grade(x[own]);
  const int newer_than = at[own];
  return total([=](int i) {
    const Grade other = grade(x[i]);
    return (at[i] >= 0) & ((other > bar) | ((other == bar) & (at[i] > newer_than)));
  });
}

Head::Cut Head::nth(const Grade* grades, int n) const {
  const int32_t* const at = position;
  Grade low = INT_MIN, high = INT_MAX;
  int below = 0;  // slots with a grade below `low`
  while (low < high) {
    const Grade middle = static_cast<Grade>((static_cast<int64_t>(low) + high) >> 1);
    const int up_to = total([=](int i) { return grades[i] <= middle; });
    if (up_to >= n) {
      high = middle;
    } else {
      low = middle + 1;
      below = up_to;
    }
  }
  const Grade cut = low;
  if (below + total([=](int i) { return grades[i] == cut; }) == n) return {cut, INT_MAX};
  int from = -1, to = newest;  // among equals, the older ones
  while (from < to) {
    const int middle = from + (to - from) / 2;
    const int up_to = total([=](int i) { return (grades[i] == cut) & (at[i] <= middle); });
    if (below + up_to >= n) to = middle;
    else from = middle + 1;
  }
  return {cut, from};
}

void Head::resolve_tops() {
  const int32_t* const at = position;
  const Grade* const grades = top_grades_;
  const int32_t* const marks = marks_;
  for (int t = 0; t < tops_; ++t) {
    const float* const x = top_[t].x;
    clear_marks();
    fill(top_grades_, [=](int i) { return at[i] >= 0 ? grade(x[i]) : below_all; });
    const Cut cut = nth(grades, slots - top_[t].n);  // the highest that is not protected
    fill(marks_, [=](int i) {
      return marks[i] | (grades[i] > cut.grade) | ((grades[i] == cut.grade) & (at[i] > cut.position));
    });
  }
  tops_ = 0;
}

void Head::grade_candidates(const float* score) {
  const int32_t* const at = position;
  const int32_t* const marks = marks_;
  const int first = first_, last = last_;
  if (marked_) {
    fill(grades_, [=](int i) {
      return (at[i] > first) & (at[i] < last) & (marks[i] == 0) ? grade(score[i]) : above_all;
    });
  } else {
    fill(grades_, [=](int i) { return (at[i] > first) & (at[i] < last) ? grade(score[i]) : above_all; });
  }
}

void Head::grade_protected(const float* score, int newest_held, bool ends) {
  const int32_t* const at = position;
  const int first = ends ? -1 : first_, last = ends ? INT_MAX : last_;
  fill(grades_, [=](int i) {
    const Grade own = at[i] == newest_held ? above_all - 1 : grade(score[i]);
    return (at[i] > first) & (at[i] < last) & (at[i] >= 0) ? own : above_all;
  });
}

void Head::free_lowest(int n) {
  if (n == 1) {
    places_[lowest()] = -1;
    return;
  }
  const Grade* const grades = grades_;
  const int32_t* const at = position;
  const Cut cut = nth(grades, n);
  fill(places_, [=](int i) {
    return (grades[i] < cut.grade) | ((grades[i] == cut.grade) & (at[i] <= cut.position)) ? -1 : at[i];
  });
}

int Head::lowest() const {
  const Grade* const grades = grades_;
  const int32_t* const at = position;
  const Grade lowest = least([=](int i) { return grades[i]; });
  if (lowest == above_all) return -1;
  const int oldest_of_them = least([=](int i) { return grades[i] == lowest ? at[i] : INT_MAX; });
  return least([=](int i) { return (grades[i] == lowest) & (at[i] == oldest_of_them) ? i : INT_MAX; });
}

bool Head::free_one(const float* score) {
  grade_candidates(score);
  for (int attempt = 0; attempt < tries; ++attempt) {
    const int victim = lowest();
    if (victim < 0) return false;
    bool leaves = true;
    for (int t = 0; t < tops_ && leaves; ++t) leaves = above(top_[t].x, victim) >= top_[t].n;
    if (leaves) {
      places_[victim] = -1;
      return true;
    }
    grades_[victim] = above_all;
  }
  return false;
}

}  // namespace kvdsl
