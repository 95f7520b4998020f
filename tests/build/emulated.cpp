// Calls a policy's kernel with arguments that another process has written: structures, and behind each what its pointers, which come
// first, point to. Writes the status, and all of that as the kernel leaves it.
//
//   [int64 pointers, int64 bytes, the structure, for each pointer: int64 bytes or -1, the bytes]...
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <kvdsl/prompt.hpp>

extern "C" {
#define KERNELS(dtype)                          \
  int kvdsl_decode_##dtype(const kvdsl::DecodeArgs*); \
  int kvdsl_prefill_##dtype(const kvdsl::DecodeArgs*, const kvdsl::PromptArgs*) __attribute__((weak));
KERNELS(f32)
KERNELS(bf16)
KERNELS(f16)
}

namespace {

struct Piece {
  char* at;
  int64_t bytes;
};

void read(void* to, int64_t bytes) {
  if (std::fread(to, 1, static_cast<std::size_t>(bytes), stdin) != static_cast<std::size_t>(bytes)) std::exit(3);
}

int64_t read_number() {
  int64_t number;
  read(&number, sizeof number);
  return number;
}

char* read_piece(int64_t bytes) {
  char* const at = static_cast<char*>(std::aligned_alloc(64, static_cast<std::size_t>((bytes + 127) / 64 * 64)));
  read(at, bytes);
  return at;
}

// A structure whose pointers point to what was sent with it.
char* read_structure(std::vector<Piece>& pieces) {
  const int64_t pointers = read_number();
  char* const structure = read_piece(read_number());
  for (int64_t i = 0; i < pointers; ++i) {
    const int64_t bytes = read_number();
    char* at = nullptr;
    if (bytes >= 0) pieces.push_back({at = read_piece(bytes), bytes});
    std::memcpy(structure + i * static_cast<int64_t>(sizeof at), &at, sizeof at);
  }
  return structure;
}

}  // namespace

int main(int, char** names) {
  std::vector<Piece> pieces;
  const bool decodes = !std::strcmp(names[1], "decode");
  const auto* const args = reinterpret_cast<const kvdsl::DecodeArgs*>(read_structure(pieces));
  const auto* const prompt = decodes ? nullptr : reinterpret_cast<const kvdsl::PromptArgs*>(read_structure(pieces));
  int32_t status = -1;
#define CALL(dtype) \
  if (!std::strcmp(names[2], #dtype)) status = decodes ? kvdsl_decode_##dtype(args) : kvdsl_prefill_##dtype(args, prompt);
  CALL(f32)
  CALL(bf16)
  CALL(f16)
  std::fwrite(&status, sizeof status, 1, stdout);
  for (const Piece& piece : pieces) std::fwrite(piece.at, 1, static_cast<std::size_t>(piece.bytes), stdout);
}
