// Working memory of a decode step: pieces of one buffer that persists between calls.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace kvdsl {

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Hands out aligned pieces of a buffer; without one, adds up their size.
class Arena {
 public:
  explicit Arena(char* base) : base_(base) {}

  template <class X>
  X* take(int64_t n) {
    char* const piece = base_ ? base_ + used_ : nullptr;
    used_ += round_up(n * static_cast<int64_t>(sizeof(X)), 64);
    return reinterpret_cast<X*>(piece);
  }

  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// A buffer that persists between calls and only grows.
class Buffer {
 public:
  ~Buffer() { std::free(data_); }

  char* reserve(int64_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = round_up(bytes, 4096);
      data_ = static_cast<char*>(std::aligned_alloc(4096, static_cast<std::size_t>(size_)));
      if (!data_) size_ = 0;
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

inline Buffer& thread_buffer() {
  static thread_local Buffer buffer;
  return buffer;
}

}  // namespace kvdsl
