// Masks from the top bits of bytes.
#pragma once

#include <cstdint>

namespace kvblock {

template <int kByte>
inline uint32_t WordMask(uint32_t word) {
  return (word >> (8 * kByte + 7) & 1) != 0 ? ~0u : 0u;
}
template <int kByte>
inline uint32_t PairMask(uint32_t low, uint32_t high) {
  return (WordMask<kByte>(low) & 0xffffu) | (WordMask<kByte>(high) & 0xffff0000u);
}

}  // namespace kvblock
