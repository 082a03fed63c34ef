// float32 to float8 and int8: rounded to nearest even, what is too large held to the largest
// number. Two at a time, the first in the low byte. NaN stays NaN, and is 0 as an int8.
//
// From sm_89 on the float8 conversions are an instruction (PTX cvt.rn.satfinite); before, and on a
// CPU, they are the arithmetic below.
#pragma once

#include <cstdint>

namespace kvblock {

// A float8 of kMantissa bits behind the point, exponents of this bias, whose largest number has the
// code kLargest. All codes are in the order of their numbers, also from the small numbers without a
// leading 1 to those with one, so that a carry of the rounding comes out right.
template <int kMantissa, int kBias, unsigned kLargest>
__device__ __forceinline__ unsigned RoundToFloat8(float x) {
  const unsigned bits = static_cast<unsigned>(__float_as_int(x));
  const unsigned sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return sign | 0x7f;
  constexpr unsigned kDropped = 23 - kMantissa, kSmallestNormal = (128 - kBias) << 23;
  unsigned code;
  if (size < kSmallestNormal) {  // in units of the smallest number
    constexpr float kUnits = static_cast<float>(1 << (kBias - 1 + kMantissa));
    code = static_cast<unsigned>(rintf(fabsf(x) * kUnits));
  } else {
    const unsigned rounded = size + (1u << (kDropped - 1)) - 1 + (size >> kDropped & 1);
    code = (rounded >> kDropped) - ((127 - kBias) << kMantissa);
  }
  return sign | (code < kLargest ? code : kLargest);
}

__device__ __forceinline__ uint16_t PairToE4m3(float x, float y) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(y), "f"(x));
  return pair;
#else
  return static_cast<uint16_t>(RoundToFloat8<3, 7, 0x7e>(x) | RoundToFloat8<3, 7, 0x7e>(y) << 8);
#endif
}

// Of two float32 how many units of 2^-24 they are, rounded to nearest even, x in the low 16 bits:
// the bits of a float16 are just that, up to 2^-13. Of what is larger they are some number above
// 2048. Negative numbers are 0, NaN is 0x7fff.
__device__ __forceinline__ uint32_t NumbersOfUnits(float x, float y) {
#if defined(__CUDA_ARCH__)
  uint32_t pair;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  return pair;
#else
  const auto number = [](float x) {
    if (x != x) return 0x7fffu;
    const float units = x > 0.0f ? x * (1 << 24) : 0.0f;
    return units > 2048.0f ? 0x7c00u : static_cast<unsigned>(rintf(units));
  };
  return number(x) | number(y) << 16;
#endif
}

// The largest of three, of each half of their bits.
__device__ __forceinline__ uint32_t LargestOfHalves(uint32_t x, uint32_t y, uint32_t z) {
#if defined(__CUDA_ARCH__)
  return __vimax3_u16x2(x, y, z);
#else
  const auto larger = [](uint32_t x, uint32_t y) { return x > y ? x : y; };
  const auto low = [](uint32_t x) { return x & 0xffff; };
  const auto high = [](uint32_t x) { return x & 0xffff0000; };
  return larger(larger(low(x), low(y)), low(z)) | larger(larger(high(x), high(y)), high(z));
#endif
}

__device__ __forceinline__ uint16_t PairToE5m2(float x, float y) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(y), "f"(x));
  return pair;
#else
  return static_cast<uint16_t>(RoundToFloat8<2, 15, 0x7b>(x) | RoundToFloat8<2, 15, 0x7b>(y) << 8);
#endif
}

__device__ __forceinline__ unsigned RoundToInt8(float x) {
  const int number = __float2int_rn(x);  // holds to int32, and takes NaN to 0
  return static_cast<unsigned>(max(-128, min(127, number))) & 0xff;
}

__device__ __forceinline__ uint16_t PairToInt8(float x, float y) {
  return static_cast<uint16_t>(RoundToInt8(x) | RoundToInt8(y) << 8);
}

}  // namespace kvblock
