// Where the slots of one KV head lie: contiguous, or in blocks of a pool that all rows share, through the row's table
// (paged attention; EQUIP, figure 18). Loops over slots iterate over runs of contiguous rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kvdsl {

struct Layout {
  char* base;                   // row of slot 0; with a table, the head's first row in block 0
  int64_t row_bytes;            // between slots
  int64_t block_bytes = 0;      // between blocks
  int size = 0;                 // slots per block
  const int64_t* table = nullptr;  // [blocks per row] the block in the pool, -1 for none; null: contiguous

  // Returns a slot's row. A slot without a block holds no token; its row is arbitrary.
  char* row(int slot) const {
    return table ? in_block(slot / size, slot % size) : base + slot * row_bytes;
  }

  // Calls body(from, to, row of `from`) for each run of slots in from .. to.
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
  // Other heads of the row may allocate blocks meanwhile. Blocks with this head's tokens exist already.
  char* in_block(int number, int offset) const {
    const int64_t found = __atomic_load_n(table + number, __ATOMIC_RELAXED);
    return base + (found < 0 ? 0 : found) * block_bytes + offset * row_bytes;
  }
};

// Allocates and frees blocks of the pool for all rows.
class Pool {
 public:
  Pool(int64_t* table, int64_t rows, int blocks_of_row, int blocks)
      : table_(table), rows_(rows), blocks_of_row_(blocks_of_row), blocks_(blocks) {}

  // Allocates a row's block unless it has one; heads may call this concurrently. Returns false if no block is free.
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

  // Frees the row's blocks in which no head holds a token. position: [heads, slots].
  void give_back(int64_t row, const int32_t* position, int heads, int slots, int size) {
    int64_t* const entries = table_ + row * blocks_of_row_;
    for (int number = 0; number < blocks_of_row_; ++number) {
      const int from = number * size, to = slots - from < size ? slots : from + size;
      if (entries[number] >= 0 && !held(position, heads, slots, from, to)) entries[number] = -1;
    }
  }

 private:
  // A linear search, once per block_size tokens of a row.
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
