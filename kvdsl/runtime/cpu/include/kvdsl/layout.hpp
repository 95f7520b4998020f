// Where the slots of one KV head lie: in one piece, or in blocks of a pool that all rows of the batch share, found through the
// row's table (as in paged attention; EQUIP, figure 18). Loops over slots go by runs, in which rows lie one after the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kvdsl {

struct Layout {
  char* base;                   // the row of slot 0; with a table, the head's first row in the pool's first block
  int64_t row_bytes;            // from slot to slot
  int64_t block_bytes = 0;      // from block to block
  int size = 0;                 // slots of a block
  const int64_t* table = nullptr;  // [blocks of a row] which block of the pool, -1 for none; null: in one piece

  // A slot's row. Of a slot without a block, in which no token is, some row of the pool.
  char* row(int slot) const {
    return table ? in_block(slot / size, slot % size) : base + slot * row_bytes;
  }

  // Calls body(from, to, row of `from`) for every run of the slots from .. to.
  template <class Body>
  void runs(int from, int to, Body&& body) const {
    if (!table) {
      if (from < to) body(from, to, base + from * row_bytes);
      return;
    }
    for (int number = from / size, offset = from % size; from < to; ++number, offset = 0) {
      const int end = size - offset < to - from ? from + size - offset : to;
      body(from, end, in_block(number, offset));
      from = end;
    }
  }

 private:
  // Another head of the row may be given a block meanwhile; one in which this head has a token is there already.
  char* in_block(int number, int offset) const {
    const int64_t found = __atomic_load_n(table + number, __ATOMIC_RELAXED);
    return base + (found < 0 ? 0 : found) * block_bytes + offset * row_bytes;
  }
};

// The blocks of all rows: who takes one, and which go back.
class Pool {
 public:
  Pool(int64_t* table, int64_t rows, int blocks_of_row, int blocks)
      : table_(table), rows_(rows), blocks_of_row_(blocks_of_row), blocks_(blocks) {}

  // Sees to it that a row has its block of that number, which its heads may ask for at once. False if no block is free.
  bool have(int64_t row, int number) {
    int64_t* const entry = table_ + row * blocks_of_row_ + number;
    if (__atomic_load_n(entry, __ATOMIC_RELAXED) >= 0) return true;
    bool has = true;
#pragma omp critical(kvdsl_blocks)
    if (*entry < 0) {
      const int64_t found = first_free();
      has = found < blocks_;
      if (has) __atomic_store_n(entry, found, __ATOMIC_RELAXED);
    }
    return has;
  }

  // Gives back the row's blocks in which no head holds a token. position: the row's, [heads, slots].
  void give_back(int64_t row, const int32_t* position, int heads, int slots, int size) {
    int64_t* const entries = table_ + row * blocks_of_row_;
    for (int number = 0; number < blocks_of_row_; ++number) {
      const int from = number * size, to = slots - from < size ? slots : from + size;
      if (entries[number] >= 0 && !held(position, heads, slots, from, to)) entries[number] = -1;
    }
  }

 private:
  // Looked for anew whenever a row needs one, once in so many tokens as a block has slots.
  int64_t first_free() const {
    std::vector<bool> taken(static_cast<std::size_t>(blocks_));
    for (int64_t i = 0; i < rows_ * blocks_of_row_; ++i) {
      if (table_[i] >= 0) taken[static_cast<std::size_t>(table_[i])] = true;
    }
    return std::find(taken.begin(), taken.end(), false) - taken.begin();
  }

  static bool held(const int32_t* position, int heads, int slots, int from, int to) {
    for (int h = 0; h < heads; ++h) {
      for (int i = from; i < to; ++i) {
        if (position[int64_t{h} * slots + i] >= 0) return true;
      }
    }
    return false;
  }

  int64_t* table_;
  int64_t rows_;
  int blocks_of_row_, blocks_;
};

}  // namespace kvdsl
