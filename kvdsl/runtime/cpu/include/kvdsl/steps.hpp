// A policy as function pointers, so that the driver is compiled once for all policies.
#pragma once

#include <cstdint>
#include <type_traits>

#include "dtype.hpp"
#include "head.hpp"

namespace kvdsl {

// The functions of a policy that selects.
struct Selecting {
  By by;
  int (*tokens)(const Query&);
  int (*page)(const Slots&);
  int (*page_after)(const Slots&);
  int (*sketch_every)(const Slots&);
  void (*always)(Head&);
  void (*expression)(const Query&, float* by);
  bool alone;
  Vote vote;
  void (*with_vote)(const Query&, const float* voted, float* by);
  void (*sketch)(const Query&, float* by);

  bool selects() const { return by != By::all; }
};

struct Steps {
  const Dtype* dtype;
  Group group;
  int columns;
  int scratch_columns;
  bool needs_attn;
  bool needs_logit;
  bool hard_cap;
  bool reads_rows;  // whether observe, settle or the choice reads cached keys or values
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
void settle_slots(Head& head) {
  if constexpr (Policy::settle_reads_keys) {
    HeadOf<T> slots{head};
    Policy::settle(slots);
  } else {
    Policy::settle(head);
  }
}

template <class T, class Policy>
void rank_slots(const Query& query, float* by) {
  Policy::expression(typed<T>(query), by);
}

template <class T, class Policy>
int count_tokens(const Query& query) {
  return Policy::tokens(typed<T>(query));
}

template <class T, class Policy>
void rank_by_vote(const Query& query, const float* voted, float* by) {
  Policy::with_vote(typed<T>(query), voted, by);
}

template <class T, class Policy>
void rank_dims(const Query& query, float* by) {
  Policy::sketch(typed<T>(query), by);
}

// Whether Policy::observe is a plain function. If it reads cached keys or values, it is a template over their dtype.
template <class Policy, class = void>
constexpr bool observes_without_rows = false;
template <class Policy>
constexpr bool observes_without_rows<Policy, std::void_t<decltype(&Policy::observe)>> = true;

// Whether a policy has columns that depend on the token alone.
template <class Derived>
constexpr bool places = &Derived::place != &Policy::place;

template <class T, class Policy>
constexpr Selecting selecting = {Policy::by,
                                 count_tokens<T, Policy>,
                                 Policy::page,
                                 Policy::page_after,
                                 Policy::sketch_every,
                                 Policy::always,
                                 rank_slots<T, Policy>,
                                 Policy::alone,
                                 Policy::vote,
                                 rank_by_vote<T, Policy>,
                                 rank_dims<T, Policy>};

// The functions for a prompt, and below for decoded tokens.
template <class T, class Policy>
constexpr Steps steps = {dtype<T>,
                         Policy::group,
                         Policy::columns,
                         Policy::scratch_columns,
                         Policy::needs_attn,
                         Policy::needs_logit,
                         Policy::hard_cap,
                         !observes_without_rows<Policy> || Policy::settle_reads_keys || Policy::choice_reads_rows,
                         places<Policy> ? Policy::place : nullptr,
                         observe<T, Policy>,
                         settle_slots<T, Policy>,
                         selecting<T, Policy>};

template <class T, class Policy>
constexpr Steps decode_steps = [] {
  Steps found = steps<T, Policy>;
  if (Policy::forgets) {
    found.needs_attn = found.needs_logit = false;
    found.observe = kvdsl::Policy::observe;
  }
  if (Policy::prefill_only) found.settle = kvdsl::Policy::settle;
  return found;
}();

}  // namespace kvdsl
