// The model's dtypes, with conversions of scalars from and to float.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvdsl {

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// Storage only; arithmetic is float.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

inline float to_float(f16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(x.bits & 0x7FFFu) << 13;
  if ((x.bits & 0x7C00u) == 0x7C00u) return bit_cast<float>(sign | rest | 0x7F800000u);  // inf and NaN
  // 2^112 moves the exponent's bias from 15 to 127 and normalizes subnormals.
  return bit_cast<float>(sign | bit_cast<uint32_t>(bit_cast<float>(rest) * 0x1p112f));
}

template <class T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

// Rounds to nearest even. NaN stays NaN even if its payload lies in the dropped bits.
template <>
inline bf16 from_float<bf16>(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  if (x != x) return {static_cast<uint16_t>((bits >> 16) | 0x0040u)};
  return {static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
inline f16 from_float<f16>(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return {static_cast<uint16_t>(sign | 0x7E00u)};    // NaN
  if (magnitude >= 0x477FF000u) return {static_cast<uint16_t>(sign | 0x7C00u)};   // rounds past 65504
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    const float shifted = bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (bit_cast<uint32_t>(shifted) - 0x3F000000u))};
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0x0FFFu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | (rounded >> 13))};
}

}  // namespace kvdsl
