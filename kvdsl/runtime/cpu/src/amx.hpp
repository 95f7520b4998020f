// Products of bfloat16 by Intel's AMX tiles, where the compiler targets them and Linux lends them. Keys are read as they lie in
// memory, a row of the tile each; queries come in pairs of dims, one query a column, so that a key's products leave in lanes.
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
constexpr int dims_at_once = 32;       // of bfloat16 in a row
constexpr int blocks = 3;              // of keys whose products do not wait for each other's
constexpr int keys_at_once = blocks * rows;

// Sixteen keys, one every `stride` bytes.
struct Keys {
  const void* first;
  int64_t stride;
};

#if KVDSL_AMX

static_assert(width == rows, "a query is a column of a tile and a lane of a vector");

// Linux lends a process the memory of tiles if it asks once.
inline bool lent() {
  constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool is_lent = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return is_lent;
}

// While it lives, this thread's tiles are whole ones, if they are wanted.
class Configured {
 public:
  explicit Configured(bool wanted) : wanted_(wanted) {
    if (!wanted) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) config.bytes[i] = row_bytes, config.rows[i] = rows;
    _tile_loadconfig(&config);
  }
  ~Configured() {
    if (wanted_) _tile_release();
  }
  Configured(const Configured&) = delete;
  Configured& operator=(const Configured&) = delete;

 private:
  bool wanted_;
};

// scores[key][query] = keys . queries; queries: [dim / 2, width, 2].
inline void dot(const Keys (&keys)[blocks], const bf16* queries, int dim, float* scores) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  for (int d = 0; d < dim; d += dims_at_once) {
    const auto part = [&](int i) { return static_cast<const bf16*>(keys[i].first) + d; };
    _tile_loadd(6, queries + d * width, row_bytes);
    _tile_loadd(3, part(0), keys[0].stride);
    _tile_dpbf16ps(0, 3, 6);
    _tile_loadd(4, part(1), keys[1].stride);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(5, part(2), keys[2].stride);
    _tile_dpbf16ps(2, 5, 6);
  }
  _tile_stored(0, scores, row_bytes);
  _tile_stored(1, scores + rows * width, row_bytes);
  _tile_stored(2, scores + 2 * rows * width, row_bytes);
}

#else

constexpr bool lent() { return false; }
struct Configured {
  explicit Configured(bool) {}
  ~Configured() {}
};
inline void dot(const Keys (&)[blocks], const bf16*, int, float*) {}

#endif

}  // namespace kvdsl::amx
