// Masks and factors from bytes.
#pragma once

#include <cstdint>
#include <type_traits>

namespace kvblock {

template <int kByte>
inline uint32_t WordMask(uint32_t word) {
  return (word >> (8 * kByte + 7) & 1) != 0 ? ~0u : 0u;
}
template <int kByte>
inline uint32_t PairMask(uint32_t low, uint32_t high) {
  return (WordMask<kByte>(low) & 0xffffu) | (WordMask<kByte>(high) & 0xffff0000u);
}
template <int kByte>
inline uint32_t OnesFrom(uint32_t low, uint32_t high, uint32_t least) {
  const auto byte = [](uint32_t word) { return word >> (8 * kByte) & 255; };
  return (byte(low) >= byte(least) ? 0x3f80u : 0u) | (byte(high) >= byte(least) ? 0x3f800000u : 0u);
}
template <typename T>
inline uint32_t TimesOnes(uint32_t pair, uint32_t ones) {
  return pair & (ones / 0x3f80u * 0xffffu);
}

}  // namespace kvblock
