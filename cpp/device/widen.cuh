// Elements of 8 bits as float16, which holds all of their values: two at a time, of the four in a
// word.
#pragma once

#include <cstdint>

namespace kvblock {

// Neighbours, as they lie: elements 0 and 1, or 2 and 3. Or every other one: 0 and 2, or 1 and 3.
enum class TwoOf { kLow, kHigh, kEven, kOdd };

__device__ __forceinline__ uint32_t Permute(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(x), "r"(y), "r"(selector));
  return bytes;
}

// The two elements' bytes, each in the upper or lower byte of a half, with those of `other`.
template <TwoOf kWhich, bool kUpper>
__device__ __forceinline__ uint32_t Spread(uint32_t four, uint32_t other) {
  constexpr uint32_t kFirst = kWhich == TwoOf::kHigh ? 2 : kWhich == TwoOf::kOdd ? 1 : 0;
  constexpr uint32_t kSecond = kWhich == TwoOf::kLow    ? 1
                               : kWhich == TwoOf::kHigh ? 3
                               : kWhich == TwoOf::kEven ? 2
                                                        : 3;
  constexpr uint32_t kSelector =
      kUpper ? 0x0404 | kFirst << 4 | kSecond << 12 : 0x4040 | kFirst | kSecond << 8;
  return Permute(four, other, kSelector);
}

struct E4m3 {
  template <TwoOf kWhich>
  __device__ __forceinline__ static uint32_t Widen(uint32_t four) {
#if __CUDA_ARCH__ >= 890
    uint32_t two;
    if constexpr (kWhich == TwoOf::kEven || kWhich == TwoOf::kOdd) {
      four = Permute(four, 0, kWhich == TwoOf::kEven ? 0x20 : 0x31);
    }
    if constexpr (kWhich == TwoOf::kHigh) {
      asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}"
          : "=r"(two)
          : "r"(four));
    } else {
      asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}"
          : "=r"(two)
          : "r"(four));
    }
    return two;
#else
    // Its exponent has one bit less, and counts from 7 where float16's counts from 15. NaN reads as
    // 480.
    const uint32_t bits = Spread<kWhich, true>(four, 0);
    const uint32_t small = (bits & 0x80008000) | (bits & 0x7f007f00) >> 1;
    uint32_t two;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(two) : "r"(small), "r"(0x5c005c00));  // 2^8
    return two;
#endif
  }
};

// The upper half of a float16.
struct E5m2 {
  template <TwoOf kWhich>
  __device__ __forceinline__ static uint32_t Widen(uint32_t four) {
    return Spread<kWhich, true>(four, 0);
  }
};

// 1024 + 128 + x, less 1152: the bits of a number from 1024 to 2047 end with its own.
struct Int8 {
  template <TwoOf kWhich>
  __device__ __forceinline__ static uint32_t Widen(uint32_t four) {
    const uint32_t bits = Spread<kWhich, false>(four ^ 0x80808080, 0x64646464);
    uint32_t two;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(two) : "r"(bits), "r"(0x64806480));
    return two;
  }
};

}  // namespace kvblock
