// Selection: a query ranks slots by something cheap and finds the highest without sorting. Attention then reads their
// keys and values in place.
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

// Returns the k-th highest grade, found bit by bit, and how many are higher.
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

// Returns the lowest tie among the k highest ties of one grade.
inline int kth_tie(const Grade* grades, const int32_t* ties, int n, Grade level, int k) {
  int low = 0, high = INT_MAX;
  while (low < high) {
    const int middle = low + (high - low) / 2 + 1;
    if (count_of(n, [=](int i) { return (grades[i] == level) & (ties[i] >= middle); }) >= k) low = middle;
    else high = middle - 1;
  }
  return low;
}

// Writes the indices of all slots of at least this grade, in order; returns their number. `to` has room for one more
// vector.
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

// Returns a lower bound of the k-th highest grade: the k-th highest of maxima of disjoint sets.
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

// Grades of candidates, padded to whole vectors with below_all.
struct Ballot {
  Grade* grades;
  Grade* maxima;
  int32_t* candidates;
  Grade* candidate_grades;
  int32_t* candidate_ties;

  // Writes the indices of the k highest of n (among equals, of the higher tie; null: the higher index) and of all that
  // are above_all, in order. Returns their number.
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

// Returns the sum or mean of a group's queries.
inline void reduce_queries(Group how, const float* queries, int group, int dim, float* reduced) {
  for (int d = 0; d < dim; ++d) {
    float total = queries[d];
    for (int g = 1; g < group; ++g) total += queries[g * dim + d];
    reduced[d] = how == Group::mean ? total / static_cast<float>(group) : total;
  }
}

// Working memory of a selection.
struct ChoiceWork {
  int choices;             // 1, or one per query head
  int32_t* wanted;         // [choices] slots or pages to select
  int64_t padded;          // slots, padded
  int chunks, chunk;       // as in Workspace
  int64_t query_stride;
  float* query;            // [group, query_stride] the queries that rank slots: in pairs, or at the sketch's dims in order
  float* plain;            // [key_dim] the group's queries reduced
  float* by;               // [padded]
  float* asked;            // [padded] this head's vote; unused, like the next, if heads select separately
  float* voted;            // [padded] the result of the vote
  float* of_head;          // [group, padded] ranks by query head, if computed separately
  float* dims;             // [key_dim] ranks of dims
  float* scores;           // [chunks, group, block]
  char* edge;              // [2, key_dim] bounds of a page that is visible in part
  int32_t* chosen;         // [padded]
  int32_t* chosen_pages;
  int32_t* own;            // [padded] a query head's selection,
  uint8_t* marks;          // [choices, padded] marks of all selections,
  int32_t* visible;        // [choices, padded] and masks over slots that any head selected; unused with one choice
  Ballot ballot;           // for the first choice; the grades of the others follow

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

// The selection of one KV head. Between begin() and choose(), every chunk is renewed if due, and ranked.
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

  // Begins after a token was placed. `pairs` is `query` in pairs. `renew`: rebuild what is derived from the keys. `packed.stored` is
  // null if keys are in the model's dtype.
  void begin(const Query& query, const float* pairs, int slot, bool renew, const Packed& packed) {
    query_ = query;
    packed_ = packed;
    pairs_ = pairs;
    renewing_ = renew;
    page_ = how_.page(query);
    if (sketch_) refresh();
    if (has_tiles() && !renewing_) dtype_.tiles.put(key(slot, 0), sketch_, query_.dims, slot % block, tile(slot));
    if (has_bounds() && !renewing_) dtype_.bounds.add(key(slot, 0), args_.key_dim, slot % page_ == 0, bounds(slot / page_));
    int least = INT_MAX;
    for (int c = 0; c < work_.choices; ++c) {
      const int tokens = how_.tokens(several() ? alone(query, c) : query), units = page_ > 0 ? tokens / page_ : tokens;
      work_.wanted[c] = units < 1 ? 1 : units;
      least = work_.wanted[c] < least ? work_.wanted[c] : least;
    }
    choosing_ = least < (how_.by == By::page_bound ? pages() : query.live) && !args_.taken;
  }

  // Computes the head's vote, if the layer's heads select together.
  void ask() { find(query_, work_.asked); }

  // Reduces the votes of `count` heads at every slot.
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
  bool renewing() const { return renewing_; }
  int count() const { return count_; }
  const int32_t* chosen() const { return work_.chosen; }
  int choices() const { return work_.choices; }
  // Returns masks, [choices, padded], of each query head's selection within the union; null with one choice.
  const int32_t* visible() const { return several() ? work_.visible : nullptr; }
  int64_t padded() const { return work_.padded; }
  float* spare() const { return work_.by; }

  // Protects what is always selected.
  void always(Head& head) {
    how_.always(head);
    first_ = head.kept_up_to();
    last_ = head.kept_from();
    if (how_.by == By::sketch_dot || how_.by == By::dot) set_query();
  }

  // Rebuilds a chunk of what is derived from the keys.
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

  // Selects, once all chunks are ranked.
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

  // Marks selected slots: [choices, slots], zeros before.
  void make(uint8_t* marks) const {
    for (int i = 0; i < count_ && !several(); ++i) marks[work_.chosen[i]] = 1;
    for (int c = 0; c < work_.choices && several(); ++c) {
      std::memcpy(marks + int64_t{c} * args_.slots, work_.marks + c * work_.padded, static_cast<std::size_t>(args_.slots));
    }
  }

  // The same if every visible slot is selected.
  void make_all(uint8_t* marks) const {
    for (int c = 0; c < work_.choices; ++c, marks += args_.slots) {
      for (int i = 0; i < args_.slots; ++i) marks[i] = query_.position[i] >= query_.oldest;
    }
  }

  // Selects marked slots.
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

  // Whether ranks are computed per query head: their queries cannot be reduced first.
  bool apart() const { return group_ == Group::max || group_ == Group::each; }

  Ballot ballot_of(int choice) const {
    Ballot own = work_.ballot;
    own.grades += choice * work_.padded;
    return own;
  }

  // Evaluates the policy's expression, for the group or per query head.
  void find(const Query& asking, float* by) const {
    if (!how_.alone || asking.group == 1) return how_.expression(asking, by);
    for (int g = 0; g < asking.group; ++g) how_.expression(alone(asking, g), work_.of_head + g * work_.padded);
    reduction(group_)(work_.of_head, work_.padded, asking.group, ones_, 0, args_.slots, by);
  }

  // Selects for one query head or the group; returns the number of slots.
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

  // Selects what is marked for any query head, [choices, stride], and stores for which.
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

  // The sketch is chosen again at every `every`-th query after the prompt's last one, and at the first without a
  // prompt.
  void refresh() {
    query_.sketch = sketch_;
    query_.dims = 0;
    while (query_.dims < args_.sketch_width && sketch_[query_.dims] >= 0) ++query_.dims;
    const int behind = query_.newest + 1 - args_.prompt[number_ / args_.kv_heads];
    if (query_.newest > 0 && behind % how_.sketch_every(query_) != 0) return;
    how_.sketch(query_, work_.dims);
    find_dims(work_.dims, args_.key_dim, query_.dims, args_.sketch_width, sketch_);
    renewing_ = true;
  }

  // Products are linear: if they are added over the group, the queries can be added first.
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

  // If the window covers a page in part, its bounds are computed from the visible tokens.
  const char* seen_bounds(int page, int chunk) const {
    if (first_seen(page) == page * page_ || first_seen(page) > last_seen(page)) return bounds(page);
    bound(page, query_.oldest, work_.edge, chunk);
    return work_.edge;
  }

  Grade grade_of_page(Grade own, int page) const {
    if (first_seen(page) > last_seen(page)) return below_all;
    return first_seen(page) <= first_ || last_seen(page) >= last_ ? above_all : own;
  }

  // Slots of a page may lie anywhere: a page ranks by its best token.
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
  bool renewing_ = false, choosing_ = false;
  int page_ = 0, count_ = 0;
  int first_ = -1, last_ = INT_MAX;  // positions up to first_ and from last_ on are always selected
};

}  // namespace kvdsl
