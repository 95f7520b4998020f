// Products of bfloat16 with Intel's AMX tiles, if the compiler targets them and Linux grants them. The left factor is
// the same for all lanes, a tile row each; the right factor has a column of pairs per lane. So the products come out in
// lanes.
#pragma once

#include <cstdint>

#include "simd.hpp"

#if defined(__AMX_BF16__) && defined(__linux__) && defined(__AVX512F__)
#define KVDSL_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define KVDSL_AMX 0
#endif

namespace kvdsl::amx {

constexpr int rows = 16, row_bytes = 64;
constexpr int at_once = 32;  // bfloat16 numbers per row
constexpr int blocks = 4;    // blocks of rows with independent products
constexpr int rows_at_once = blocks * rows;

// Rows of a left factor, `stride` bytes apart.
struct Rows {
  const void* first;
  int64_t stride;
};

#if KVDSL_AMX

static_assert(width == rows, "a query is a column of a tile and a lane of a vector");

// Asks Linux once for permission to use tile memory.
inline bool lent() {
  constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool is_lent = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return is_lent;
}

// Configures this thread's tiles as whole ones during its lifetime, if wanted.
class Configured {
 public:
  explicit Configured(bool wanted) : wanted_(wanted) {
    // A constant: GCC may drop writes to a variable, because the intrinsic names only its first bytes.
    alignas(64) static constexpr struct {
      uint8_t palette, start_row, reserved[14];
      uint16_t bytes[16];
      uint8_t rows[16];
    } config = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    static_assert(row_bytes == 64 && rows == 16);
    if (wanted) _tile_loadconfig(&config);
  }
  ~Configured() {
    if (wanted_) _tile_release();
  }
  Configured(const Configured&) = delete;
  Configured& operator=(const Configured&) = delete;

 private:
  bool wanted_;
};

// sums[block * rows + row][lane] += sum over i < n of left[block][row][i] * right[i][lane], for `Blocks` of `rows`
// rows; with FromZero, sums start at 0. right: [n / 2, lanes, 2]. Strides are in bytes.
template <int Blocks, bool FromZero>
inline void add_products(const Rows* left, const void* right, int64_t right_stride, int n, float* sums, int64_t sums_stride) {
  const auto place = [&](int block) { return reinterpret_cast<char*>(sums) + block * rows * sums_stride; };
  if constexpr (FromZero) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, place(0), sums_stride);
    if constexpr (Blocks > 1) _tile_loadd(1, place(1), sums_stride);
    if constexpr (Blocks > 2) _tile_loadd(2, place(2), sums_stride);
    if constexpr (Blocks > 3) _tile_loadd(3, place(3), sums_stride);
  }
  for (int i = 0; i < n; i += at_once) {
    const auto part = [&](int block) { return static_cast<const bf16*>(left[block].first) + i; };
    _tile_loadd(6, static_cast<const char*>(right) + i / 2 * right_stride, right_stride);
    _tile_loadd(4, part(0), left[0].stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Blocks > 1) {
      _tile_loadd(5, part(1), left[1].stride);
      _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (Blocks > 2) {
      _tile_loadd(4, part(2), left[2].stride);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (Blocks > 3) {
      _tile_loadd(5, part(3), left[3].stride);
      _tile_dpbf16ps(3, 5, 6);
    }
  }
  _tile_stored(0, place(0), sums_stride);
  if constexpr (Blocks > 1) _tile_stored(1, place(1), sums_stride);
  if constexpr (Blocks > 2) _tile_stored(2, place(2), sums_stride);
  if constexpr (Blocks > 3) _tile_stored(3, place(3), sums_stride);
}

// sums[row][half * 16 + lane] = sum over i < n of left[row][i] * right[half][i][lane], for 16 rows and two halves of
// `apart` pairs. right: [n / 2, 16, 2] each. `sums_stride` is in bytes.
template <class Two>
inline void add_columns(Rows left, const Two* right, int64_t apart, int n, float* sums, int64_t sums_stride) {
  _tile_zero(0);
  _tile_zero(1);
  for (int i = 0; i < n; i += at_once) {
    _tile_loadd(4, static_cast<const bf16*>(left.first) + i, left.stride);
    _tile_loadd(5, right + i / 2 * rows, row_bytes);
    _tile_loadd(6, right + apart + i / 2 * rows, row_bytes);
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 6);
  }
  _tile_stored(0, sums, sums_stride);
  _tile_stored(1, sums + rows, sums_stride);
}

// Pairs up the numbers d to d + 32 of two rows. `low` receives the first four of every eight, `high` the others.
template <class Two>
inline void interleave(const void* one, const void* other, int d, Two* low, Two* high) {
  const __m512i a = _mm512_loadu_si512(static_cast<const bf16*>(one) + d), b = _mm512_loadu_si512(static_cast<const bf16*>(other) + d);
  _mm512_storeu_si512(low, _mm512_unpacklo_epi16(a, b));
  _mm512_storeu_si512(high, _mm512_unpackhi_epi16(a, b));
}

// Sums over dims in the order of `interleave`, as a pair of bfloat16 rows.
inline Pair in_pairs(const float* sums) {
  const Floats low = load(sums), high = load(sums + rows);
  return {__builtin_shufflevector(low, high, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30),
          __builtin_shufflevector(low, high, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31)};
}

// Rounds 32 numbers to bfloat16, in order.
template <class Two>
inline void round(const float* numbers, Two* to) {
  _mm512_storeu_si512(to, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_loadu_ps(numbers + rows), _mm512_loadu_ps(numbers))));
}

#else

constexpr bool lent() { return false; }
struct Configured {
  explicit Configured(bool) {}
  ~Configured() {}
};
template <int Blocks, bool FromZero>
inline void add_products(const Rows*, const void*, int64_t, int, float*, int64_t) {}
template <class Two>
inline void add_columns(Rows, const Two*, int64_t, int, float*, int64_t) {}
template <class Two>
inline void interleave(const void*, const void*, int, Two*, Two*) {}
inline Pair in_pairs(const float* sums) { return load_pair(sums); }
template <class Two>
inline void round(const float*, Two*) {}

#endif

}  // namespace kvdsl::amx
