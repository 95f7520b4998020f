// Profile of a decode step.
#pragma once

#include <omp.h>

#include <kvdsl/args.hpp>

namespace kvdsl {

enum class Stage { place, renew, look, choose, attend, finish };
constexpr int stages = 6;

// One thread's times per stage, added up at the end if wanted.
class Laps {
 public:
  explicit Laps(const DecodeArgs& args) : to_(args.seconds), last_(to_ ? omp_get_wtime() : 0) {}

  ~Laps() {
    if (!to_) return;
#pragma omp critical(kvdsl_laps)
    for (int i = 0; i < stages; ++i) to_[i] += sums_[i];
  }

  void end(Stage stage) {
    if (!to_) return;
    const double now = omp_get_wtime();
    sums_[static_cast<int>(stage)] += now - last_;
    last_ = now;
  }

 private:
  double* to_;
  double last_;
  double sums_[stages] = {};
};

}  // namespace kvdsl
