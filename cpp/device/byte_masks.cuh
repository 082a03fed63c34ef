// Masks and factors from bytes (PTX prmt, set, mul).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

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

// Two numbers in bfloat16: 1 where byte kByte of `low` is at least that of `least`, else 0, and the
// same of `high`. Bytes are below 128, and all of `least` are alike.
//
// A byte twice is a positive number in bfloat16, and greater where the byte is: so a comparison of
// floats serves.
template <int kByte>
__device__ __forceinline__ uint32_t OnesFrom(uint32_t low, uint32_t high, uint32_t least) {
  constexpr int kTwice = kByte * 0x0011 | (kByte + 4) * 0x1100;
  uint32_t ones;
  asm("{\n"
      ".reg .b32 bytes;\n"
      "prmt.b32 bytes, %1, %2, %4;\n"
      "set.ge.bf16x2.bf16x2 %0, bytes, %3;\n"
      "}"
      : "=r"(ones)
      : "r"(low), "r"(high), "r"(least), "n"(kTwice));
  return ones;
}

// Two numbers of T times those ones.
template <typename T>
__device__ __forceinline__ uint32_t TimesOnes(uint32_t pair, uint32_t ones) {
  uint32_t product;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(ones));
  } else {  // 1 in float16 has four of its bits
    asm("mul.f16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(ones & 0x3c003c00u));
  }
  return product;
}

}  // namespace kvblock
