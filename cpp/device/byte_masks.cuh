// Masks from the top bits of bytes (PTX prmt).
#pragma once

#include <cstdint>

namespace kvblock {

// Two bytes of ones where the top bit of byte kByte of `low` is 1, and two of that of `high`.
template <int kByte>
__device__ __forceinline__ uint32_t PairMask(uint32_t low, uint32_t high) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, %2, %3;"
      : "=r"(mask)
      : "r"(low), "r"(high), "n"(0x8888 | kByte * 0x11 | (kByte + 4) * 0x1100));
  return mask;
}

// Four bytes of them.
template <int kByte>
__device__ __forceinline__ uint32_t WordMask(uint32_t word) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(mask) : "r"(word), "n"(0x8888 | kByte * 0x1111));
  return mask;
}

}  // namespace kvblock
