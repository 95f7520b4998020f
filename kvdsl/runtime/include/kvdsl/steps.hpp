// A policy as the driver knows it: functions behind pointers, so that the driver is compiled once, whatever the dtype.
#pragma once

#include <cstdint>

#include "attend.hpp"
#include "head.hpp"
#include "select.hpp"
#include "types.hpp"

namespace kvdsl {

// What the driver needs to know of a policy, for the same reason that there is a Dtype.
struct Steps {
  Dtype dtype;
  int columns;
  int scratch_columns;
  bool needs_attn;
  bool needs_logit;
  bool hard_cap;
  void (*reduce)(const float* rows, int64_t stride, int group, const float* factors, int from, int to, float* reduced);
  void (*place)(const Slot&);
  void (*observe)(const Query&);
  void (*settle)(Head&);
  Selecting selecting;
};

template <class T>
QueryOf<T> typed(const Query& query) {
  return {query};
}

template <class T, class Policy>
void observe(const Query& query) {
  Policy::observe(typed<T>(query));
}

template <class T, class Policy>
void rank_slots(const Query& query, float* by) {
  Policy::rank(typed<T>(query), by);
}

template <class T, class Policy>
void rank_dims(const Query& query, float* by) {
  Policy::sketch(typed<T>(query), by);
}

// Whether a policy has columns that a token has by itself.
template <class Derived>
constexpr bool places = &Derived::place != &Policy::place;

template <class T, class Policy>
constexpr Selecting selecting = {Policy::by,
                                 Policy::group == Group::max,
                                 tiles<T>,
                                 bounds<T>,
                                 reduce_group<Policy::group>,
                                 reduce_queries<Policy::group>,
                                 Policy::tokens,
                                 Policy::page,
                                 Policy::sketch_every,
                                 Policy::always,
                                 rank_slots<T, Policy>,
                                 rank_dims<T, Policy>};

template <class T, class Policy>
constexpr Steps steps = {dtype<T>,
                         Policy::columns,
                         Policy::scratch_columns,
                         Policy::needs_attn,
                         Policy::needs_logit,
                         Policy::hard_cap,
                         reduce_group<Policy::group>,
                         places<Policy> ? Policy::place : nullptr,
                         observe<T, Policy>,
                         Policy::settle,
                         selecting<T, Policy>};

}  // namespace kvdsl
