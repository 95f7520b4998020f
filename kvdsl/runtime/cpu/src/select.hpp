// What a query attends to, of all that is cached: it grades the slots by something cheap, and the highest are found without
// sorting. Attention then reads their keys and values where they lie.
#pragma once

#include <climits>
#include <cstdint>
#include <cstring>
#include <vector>

#include <kvdsl/args.hpp>
#include <kvdsl/head.hpp>
#include <kvdsl/steps.hpp>

#include "arena.hpp"
#include "attend.hpp"
#include "packed.hpp"
#include "pages.hpp"
#include "simd.hpp"
#include "sketch.hpp"

namespace kvdsl {

// -- the highest of many ----------------------------------------------------------------------------------------------

template <class Value>
inline int count_of(int n, Value value) {
  int total = 0;
#pragma omp simd reduction(+ : total)
  for (int i = 0; i < n; ++i) total += value(i);
  return total;
}

// The k-th highest, bit by bit, and how many are higher.
inline Grade kth_highest(const Grade* grades, int n, int k, int& higher) {
  Grade low = below_all, high = above_all;
  higher = 0;
  while (low < high) {
    const Grade middle = static_cast<Grade>((static_cast<int64_t>(low) + high) >> 1);
    const int above = count_of(n, [=](int i) { return grades[i] > middle; });
    if (above >= k) {
      low = middle + 1;
    } else {
      high = middle;
      higher = above;
    }
  }
  return low;
}

// Among those of one grade, the tie that the k highest ties reach down to.
inline int kth_tie(const Grade* grades, const int32_t* ties, int n, Grade level, int k) {
  int low = 0, high = INT_MAX;
  while (low < high) {
    const int middle = low + (high - low) / 2 + 1;
    if (count_of(n, [=](int i) { return (grades[i] == level) & (ties[i] >= middle); }) >= k) low = middle;
    else high = middle - 1;
  }
  return low;
}

// The indices of all of at least this grade, in order; returns how many. `to` has room for a vector more.
inline int collect(const Grade* grades, int n, Grade least, int32_t* to) {
  int found = 0;
  for (int i = 0; i < n; i += width) {
    const Grade* const from = grades + i;
    int any = 0;
#pragma omp simd reduction(| : any)
    for (int l = 0; l < width; ++l) any |= from[l] >= least;
    if (!any) continue;
    for (int l = 0; l < width; ++l) {
      to[found] = i + l;
      found += from[l] >= least;
    }
  }
  return found;
}

// A grade that at least k reach, and not many more do: of so many maxima of disjoint sets the k-th highest.
inline Grade reached_by(const Grade* grades, int n, int k, Grade* maxima) {
  const int vectors = n / width;
  int per_set = n / (2 * k);
  if (per_set < 2) return below_all + 1;
  per_set = per_set < vectors ? per_set : vectors;
  const int sets = vectors / per_set;
  for (int s = 0; s < sets; ++s) {
    const Grade* const from = grades + int64_t{s} * per_set * width;
    Ints top = load_as<Ints>(from);
    for (int v = 1; v < per_set; ++v) {
      const Ints x = load_as<Ints>(from + v * width);
      top = x > top ? x : top;
    }
    __builtin_memcpy(maxima + s * width, &top, sizeof(top));
  }
  int higher;
  const Grade reached = kth_highest(maxima, sets * width, k, higher);
  return reached > below_all ? reached : below_all + 1;
}

// Where a choice is made: grades padded to whole vectors with below_all.
struct Ballot {
  Grade* grades;
  Grade* maxima;
  int32_t* candidates;
  Grade* candidate_grades;
  int32_t* candidate_ties;

  // The indices of the k highest of n, of equals those with the higher tie (null: the higher index), and of all that are
  // above_all; in order. Returns how many.
  int choose(const int32_t* ties, int n, int k, int32_t* chosen) const {
    const Grade* const all = grades;
    if (count_of(n, [=](int i) { return all[i] != below_all; }) <= k) return collect(grades, n, below_all + 1, chosen);
    const int found = collect(grades, n, reached_by(grades, n, k, maxima), candidates);
    for (int i = 0; i < found; ++i) {
      candidate_grades[i] = grades[candidates[i]];
      candidate_ties[i] = ties ? ties[candidates[i]] : candidates[i];
    }
    int higher;
    const Grade level = kth_highest(candidate_grades, found, k, higher);
    const bool ties_matter =
        level != above_all && count_of(found, [own = candidate_grades, level](int i) { return own[i] == level; }) > k - higher;
    const int tie = ties_matter ? kth_tie(candidate_grades, candidate_ties, found, level, k - higher) : 0;
    int count = 0;
    for (int i = 0; i < found; ++i) {
      chosen[count] = candidates[i];
      count += (candidate_grades[i] > level) | ((candidate_grades[i] == level) & (candidate_ties[i] >= tie));
    }
    return count;
  }
};

// -- one head's choice ------------------------------------------------------------------------------------------------

// The sum or mean of a group's queries.
inline void reduce_queries(Group how, const float* queries, int group, int dim, float* reduced) {
  for (int d = 0; d < dim; ++d) {
    float total = queries[d];
    for (int g = 1; g < group; ++g) total += queries[g * dim + d];
    reduced[d] = how == Group::mean ? total / static_cast<float>(group) : total;
  }
}

// What a choice is made in.
struct ChoiceWork {
  int choices;             // 1, or one for each query head
  int32_t* wanted;         // [choices] how many slots or pages are chosen
  int64_t padded;          // slots, padded
  int chunks, chunk;       // as in Workspace
  int64_t query_stride;
  float* query;            // [group, query_stride] what grades the slots: in pairs, or over the sketch's dims in their order
  float* plain;            // [key_dim] the group's queries as one
  float* by;               // [padded]
  float* asked;            // [padded] what the head votes with; nothing where heads choose by themselves, nor is the next
  float* voted;            // [padded] what came of it
  float* of_head;          // [group, padded] of query heads that are asked one by one
  float* dims;             // [key_dim] what grades the dims
  float* scores;           // [chunks, group, block]
  char* edge;              // [2, key_dim] the bounds of a page of which a query sees a part
  int32_t* chosen;         // [padded]
  int32_t* chosen_pages;
  int32_t* own;            // [padded] what a query head has chosen,
  uint8_t* marks;          // [choices, padded] the same of all of them,
  int32_t* visible;        // [choices, padded] and which of those that any has chosen: masks; nothing where there is one choice
  Ballot ballot;           // the first one's; those of the others have their grades behind

  ChoiceWork(const DecodeArgs& args, const Steps& steps, int chunk_size, int chunk_count, Arena& arena)
      : choices(steps.group == Group::each ? args.group : 1), chunks(chunk_count), chunk(chunk_size),
        query_stride(round_up(args.key_dim, pair)) {
    const bool selects = steps.selecting.selects();
    padded = selects ? round_up(args.slots, block) + 2 * block : 0;
    const int64_t apart = choices > 1 ? padded : 0;
    wanted = arena.take<int32_t>(choices);
    query = arena.take<float>(selects ? args.group * query_stride : 0);
    plain = arena.take<float>(selects ? args.key_dim : 0);
    by = arena.take<float>(padded);
    asked = arena.take<float>(steps.selecting.vote != Vote::none ? padded : 0);
    voted = arena.take<float>(steps.selecting.vote != Vote::none ? padded : 0);
    of_head = arena.take<float>(steps.selecting.alone && choices == 1 ? args.group * padded : 0);
    dims = arena.take<float>(selects ? args.key_dim : 0);
    scores = arena.take<float>(selects ? int64_t{chunks} * args.group * block : 0);
    edge = arena.take<char>(selects ? int64_t{2} * args.key_dim * steps.dtype->size : 0);
    chosen = arena.take<int32_t>(padded);
    chosen_pages = arena.take<int32_t>(padded);
    own = arena.take<int32_t>(apart);
    marks = arena.take<uint8_t>(choices * apart);
    visible = arena.take<int32_t>(choices * apart);
    ballot.grades = arena.take<Grade>(choices * padded);
    ballot.maxima = arena.take<Grade>(padded);
    ballot.candidates = arena.take<int32_t>(padded);
    ballot.candidate_grades = arena.take<Grade>(padded);
    ballot.candidate_ties = arena.take<int32_t>(padded);
  }
};

// What one KV head attends to. Between begin() and choose(), every chunk is renewed if that is due, and looked at.
class Choice {
 public:
  // How keys are stored that are not in the model's dtype, and room for a block of them as floats in every chunk.
  struct Packed {
    const Stored* stored;
    Layout rows;
    float* plain;
    int64_t stride;
  };

  Choice(const DecodeArgs& args, const Steps& steps, const ChoiceWork& work, const float* ones, int number)
      : args_(args), how_(steps.selecting), group_(steps.group), dtype_(*steps.dtype), work_(work), ones_(ones), number_(number) {
    if (args.sketch) sketch_ = args.sketch + int64_t{number} * args.sketch_width;
  }

  // After a token was placed. The query sees what `query` says; `pairs` is the same in pairs. `anew`: what is kept beside the
  // keys must be made from them. `packed.stored` is null if keys are in the model's dtype.
  void begin(const Query& query, const float* pairs, int slot, bool anew, const Packed& packed) {
    query_ = query;
    packed_ = packed;
    pairs_ = pairs;
    anew_ = anew;
    page_ = how_.page(query);
    if (sketch_) refresh();
    if (has_tiles() && !anew_) dtype_.tiles.put(key(slot, 0), sketch_, query_.dims, slot % block, tile(slot));
    if (has_bounds() && !anew_) dtype_.bounds.add(key(slot, 0), args_.key_dim, slot % page_ == 0, bounds(slot / page_));
    int least = INT_MAX;
    for (int c = 0; c < work_.choices; ++c) {
      const int tokens = how_.tokens(several() ? alone(query, c) : query), units = page_ > 0 ? tokens / page_ : tokens;
      work_.wanted[c] = units < 1 ? 1 : units;
      least = work_.wanted[c] < least ? work_.wanted[c] : least;
    }
    choosing_ = least < (how_.by == By::page_bound ? pages() : query.live) && !args_.taken;
  }

  // Finds what the head votes with, where the heads of a layer choose together.
  void ask() { find(query_, work_.asked); }

  // What the heads find at every slot, reduced. count: how many there are.
  template <class Heads>
  void hear(const Heads& heads, int count) {
    for (int i = 0; i < args_.slots; ++i) {
      float total = heads(0)[i];
      for (int h = 1; h < count; ++h) {
        const float own = heads(h)[i];
        total = how_.vote == Vote::max ? maximum(total, own) : how_.vote == Vote::min ? minimum(total, own) : total + own;
      }
      work_.voted[i] = how_.vote == Vote::mean ? total / static_cast<float>(count) : total;
    }
  }

  const float* asked() const { return work_.asked; }

  bool choosing() const { return choosing_; }
  bool renewing() const { return anew_; }
  int count() const { return count_; }
  const int32_t* chosen() const { return work_.chosen; }
  int choices() const { return work_.choices; }
  // Masks, [choices, padded], of what each query head has chosen of all that is chosen; null where there is one choice.
  const int32_t* visible() const { return several() ? work_.visible : nullptr; }
  int64_t padded() const { return work_.padded; }
  float* spare() const { return work_.by; }

  // What is chosen in any case.
  void always(Head& head) {
    how_.always(head);
    first_ = head.kept_up_to();
    last_ = head.kept_from();
    if (how_.by == By::sketch_dot || how_.by == By::dot) set_query();
  }

  // Makes a chunk of what is kept beside the keys.
  void renew(int chunk) {
    if (has_tiles()) {
      const int end = end_of(chunk);
      for (int slot = chunk * work_.chunk; packed_.stored && slot < end; ++slot) {
        dtype_.tiles.put(key(slot, chunk), sketch_, query_.dims, slot % block, tile(slot));
      }
      for (int from = chunk * work_.chunk; !packed_.stored && from < end; from += block) {
        query_.keys.runs(from, end - from < block ? end : from + block, [&](int first, int last, const char* row) {
          dtype_.tiles.fill(row, args_.key_dim, first - from, last - from, sketch_, query_.dims, tile(from));
        });
      }
    }
    if (has_bounds()) {
      for (int page = first_page(chunk); page < first_page(chunk + 1); ++page) bound(page, 0, bounds(page), chunk);
    }
  }

  // Ranks the slots or pages of a chunk.
  void look(int chunk) {
    if (how_.by == By::page_bound) look_at_pages(chunk);
    else if (how_.by != By::expression) look_at_slots(chunk);
  }

  // Chooses, once all are ranked.
  void choose() {
    if (!several()) {
      count_ = choose_for(0, work_.chosen);
      return;
    }
    std::memset(work_.marks, 0, static_cast<std::size_t>(work_.choices * work_.padded));
    for (int c = 0; c < work_.choices; ++c) {
      const int found = choose_for(c, work_.own);
      for (int i = 0; i < found; ++i) work_.marks[c * work_.padded + work_.own[i]] = 1;
    }
    unite(work_.marks, work_.padded);
  }

  // Marks what was chosen, of slots of which none is marked: [choices, slots].
  void make(uint8_t* marks) const {
    for (int i = 0; i < count_ && !several(); ++i) marks[work_.chosen[i]] = 1;
    for (int c = 0; c < work_.choices && several(); ++c) {
      std::memcpy(marks + int64_t{c} * args_.slots, work_.marks + c * work_.padded, static_cast<std::size_t>(args_.slots));
    }
  }

  // The same where that is all that the query sees.
  void make_all(uint8_t* marks) const {
    for (int c = 0; c < work_.choices; ++c, marks += args_.slots) {
      for (int i = 0; i < args_.slots; ++i) marks[i] = query_.position[i] >= query_.oldest;
    }
  }

  // Chooses what is marked.
  void take(const uint8_t* marks) {
    if (several()) return unite(marks, args_.slots);
    count_ = 0;
    for (int i = 0; i < args_.slots; ++i) {
      work_.chosen[count_] = i;
      count_ += marks[i];
    }
  }

 private:
  bool several() const { return work_.choices > 1; }

  // Whether the query heads' products are reduced, or none of both, and not their queries.
  bool apart() const { return group_ == Group::max || group_ == Group::each; }

  Ballot ballot_of(int choice) const {
    Ballot own = work_.ballot;
    own.grades += choice * work_.padded;
    return own;
  }

  // The policy's expression, as the query heads find it together or one by one.
  void find(const Query& asking, float* by) const {
    if (!how_.alone || asking.group == 1) return how_.expression(asking, by);
    for (int g = 0; g < asking.group; ++g) how_.expression(alone(asking, g), work_.of_head + g * work_.padded);
    reduction(group_)(work_.of_head, work_.padded, asking.group, ones_, 0, args_.slots, by);
  }

  // What one query head, or all together, choose; returns how many.
  int choose_for(int choice, int32_t* chosen) {
    const Ballot ballot = ballot_of(choice);
    if (how_.by == By::expression) {
      const Query asking = several() ? alone(query_, choice) : query_;
      if (how_.vote == Vote::none) {
        find(asking, work_.by);
      } else {
        std::memcpy(work_.by, work_.voted, sizeof(float) * static_cast<std::size_t>(args_.slots));
        how_.with_vote(asking, work_.voted, work_.by);
      }
      for (int from = 0; from < args_.slots; from += block) rank_slots(work_.by + from, from, ballot.grades);
    }
    if (page_ > 0) return choose_pages(ballot, work_.wanted[choice], chosen);
    return ballot.choose(query_.position, padded(args_.slots), work_.wanted[choice], chosen);
  }

  // Chooses what is marked for any query head, [choices, stride], and notes for which.
  void unite(const uint8_t* marks, int64_t stride) {
    count_ = 0;
    for (int i = 0; i < args_.slots; ++i) {
      int any = 0;
      for (int c = 0; c < work_.choices; ++c) {
        const int own = marks[c * stride + i];
        work_.visible[c * work_.padded + count_] = -own;
        any |= own;
      }
      work_.chosen[count_] = i;
      count_ += any;
    }
    for (int c = 0; c < work_.choices; ++c) {
      for (int i = count_; i < padded(count_); ++i) work_.visible[c * work_.padded + i] = 0;
    }
  }

  // The key of a slot. One that is packed goes to place r of the chunk's block.
  const char* key(int slot, int chunk, int r = 0) const {
    if (!packed_.stored) return query_.keys.row(slot);
    float* const to = packed_.plain + (int64_t{chunk} * block + r) * packed_.stride;
    packed_.stored->unpack(packed_.rows.row(slot), args_.key_dim, to);
    return reinterpret_cast<const char*>(to);
  }

  char* tile(int slot) const {
    const int64_t tile_of_all = number_ * ((int64_t{args_.slots} + block - 1) / block) + slot / block;
    return static_cast<char*>(args_.sketch_keys) + tile_of_all * args_.sketch_width * block * dtype_.size;
  }

  char* bounds(int page) const {
    return static_cast<char*>(args_.page_bounds) + (int64_t{number_} * args_.pages + page) * 2 * args_.key_dim * dtype_.size;
  }

  bool has_tiles() const { return args_.sketch_keys && how_.by == By::sketch_dot; }
  bool has_bounds() const { return args_.page_bounds && how_.by == By::page_bound; }
  int pages() const { return query_.newest / page_ + 1; }
  int first_page(int chunk) const { return static_cast<int>(int64_t{pages()} * chunk / work_.chunks); }

  int end_of(int chunk) const {
    const int end = (chunk + 1) * work_.chunk;
    return end < args_.slots ? end : args_.slots;
  }

  static int padded(int n) { return static_cast<int>(round_up(n, block)); }

  // The sketch's dims are found anew at every so many queries after the prompt's last, and at the first where there was no prompt.
  void refresh() {
    query_.sketch = sketch_;
    query_.dims = 0;
    while (query_.dims < args_.sketch_width && sketch_[query_.dims] >= 0) ++query_.dims;
    const int behind = query_.newest + 1 - args_.prompt[number_ / args_.kv_heads];
    if (query_.newest > 0 && behind % how_.sketch_every(query_) != 0) return;
    how_.sketch(query_, work_.dims);
    find_dims(work_.dims, args_.key_dim, query_.dims, args_.sketch_width, sketch_);
    anew_ = true;
  }

  // Products are linear: where the group's are added up, its queries may be, before.
  void set_query() {
    const int heads = apart() ? args_.group : 1, dim = args_.key_dim;
    for (int h = 0; h < heads; ++h) {
      const float* plain = query_.query + int64_t{h} * dim;
      if (!apart()) reduce_queries(group_, query_.query, args_.group, dim, work_.plain), plain = work_.plain;
      float* const to = work_.query + h * work_.query_stride;
      if (how_.by == By::dot) dtype_.pack(plain, dim, to);
      else for (int j = 0; j < query_.dims; ++j) to[j] = plain[sketch_[j]];
    }
  }

  void look_at_slots(int chunk) {
    const int heads = apart() ? args_.group : 1;
    float* const scores = work_.scores + int64_t{chunk} * args_.group * block;
    for (int from = chunk * work_.chunk; from < end_of(chunk); from += block) {
      if (how_.by == By::sketch_dot) {
        dtype_.tiles.dot(tile(from), work_.query, work_.query_stride, heads, query_.dims, scores);
      } else {
        const void* rows[block];
        for (int r = 0; r < block; ++r) rows[r] = key(from + r < args_.slots ? from + r : from, chunk, r);
        Next next;
        find_next(query_.keys, from, args_.slots, 0, next);
        dtype_.dot(work_.query, work_.query_stride, heads, rows, &next, args_.key_dim, scores, block);
      }
      reduce(scores, heads);
      for (int c = 0; c < work_.choices; ++c) rank_slots(scores + c * block, from, ballot_of(c).grades);
    }
  }

  void look_at_pages(int chunk) {
    float* const scores = work_.scores + int64_t{chunk} * args_.group * block;
    const int end = first_page(chunk + 1);
    for (int from = first_page(chunk); from < end; from += block) {
      const int n = end - from < block ? end - from : block;
      for (int i = 0; i < n; ++i) {
        dtype_.bounds.score(seen_bounds(from + i, chunk), args_.key_dim, pairs_, work_.query_stride, args_.group, scores + i, block);
      }
      reduce(scores, args_.group);
      for (int c = 0; c < work_.choices; ++c) {
        Grade* const grades = ballot_of(c).grades;
        for (int i = 0; i < n; ++i) grades[from + i] = grade_of_page(grade(scores[c * block + i]), from + i);
      }
    }
  }

  void reduce(float* scores, int heads) const {
    if (heads > 1 && !several()) reduction(group_)(scores, block, heads, ones_, 0, block, scores);
  }

  void rank_slots(const float* by, int from, Grade* grades) const {
    const int32_t* const at = query_.position + from;
    Grade* const to = grades + from;
    const int n = args_.slots - from < block ? args_.slots - from : block;
    const int first = first_, last = last_, oldest = query_.oldest;
#pragma omp simd
    for (int i = 0; i < n; ++i) {
      const Grade own = (at[i] <= first) | (at[i] >= last) ? above_all : grade(by[i]);
      to[i] = at[i] >= oldest ? own : below_all;
    }
    for (int i = n; i < block; ++i) to[i] = below_all;
  }

  // -- pages ----------------------------------------------------------------------------------------------------------

  int first_seen(int page) const { return page * page_ > query_.oldest ? page * page_ : query_.oldest; }
  int last_seen(int page) const { return query_.newest - page * page_ < page_ ? query_.newest : page * page_ + page_ - 1; }

  void bound(int page, int oldest, char* to, int chunk) const {
    const int first = page * page_ > oldest ? page * page_ : oldest;
    for (int slot = first; slot <= last_seen(page); ++slot) {
      dtype_.bounds.add(key(slot, chunk), args_.key_dim, slot == first, to);
    }
  }

  // Of a page that has left the window in part, the bounds of the rest are found now.
  const char* seen_bounds(int page, int chunk) const {
    if (first_seen(page) == page * page_ || first_seen(page) > last_seen(page)) return bounds(page);
    bound(page, query_.oldest, work_.edge, chunk);
    return work_.edge;
  }

  Grade grade_of_page(Grade own, int page) const {
    if (first_seen(page) > last_seen(page)) return below_all;
    return first_seen(page) <= first_ || last_seen(page) >= last_ ? above_all : own;
  }

  // Of tokens that lie anywhere: a page grades by the best of them.
  int choose_scattered_pages(const Ballot& ballot, int wanted, int32_t* chosen) const {
    const Pages pages = query_.pages(page_, how_.page_after(query_));
    const int count = static_cast<int>(pages.place.size());
    Grade* const best = ballot.candidates;
    for (int page = 0; page < padded(count); ++page) best[page] = below_all;
    for (int slot = 0; slot < args_.slots; ++slot) {
      Grade& of_page = best[pages.of[slot]];
      of_page = ballot.grades[slot] > of_page ? ballot.grades[slot] : of_page;
    }
    std::memcpy(ballot.grades, best, sizeof(Grade) * static_cast<std::size_t>(padded(count)));
    const int found = ballot.choose(nullptr, padded(count), wanted, work_.chosen_pages);
    std::vector<uint8_t> taken(static_cast<std::size_t>(count));
    for (int i = 0; i < found; ++i) taken[work_.chosen_pages[i]] = 1;
    int most = 0;
    for (int slot = 0; slot < args_.slots; ++slot) {
      chosen[most] = slot;
      most += query_.visible(slot) && taken[pages.of[slot]];
    }
    return most;
  }

  int choose_pages(const Ballot& ballot, int wanted, int32_t* chosen) const {
    if (how_.by != By::page_bound) return choose_scattered_pages(ballot, wanted, chosen);
    for (int page = pages(); page < padded(pages()); ++page) ballot.grades[page] = below_all;
    const int found = ballot.choose(nullptr, padded(pages()), wanted, work_.chosen_pages);
    int count = 0;
    for (int i = 0; i < found; ++i) {
      const int page = work_.chosen_pages[i];
      for (int slot = first_seen(page); slot <= last_seen(page); ++slot) chosen[count++] = slot;
    }
    return count;
  }

  const DecodeArgs& args_;
  const Selecting& how_;
  Group group_;
  const Dtype& dtype_;
  ChoiceWork work_;
  const float* ones_;
  int number_;
  int32_t* sketch_ = nullptr;
  Query query_{};
  Packed packed_{};
  const float* pairs_ = nullptr;
  bool anew_ = false, choosing_ = false;
  int page_ = 0, count_ = 0;
  int first_ = -1, last_ = INT_MAX;  // positions up to the one and from the other on are chosen in any case
};

}  // namespace kvdsl
