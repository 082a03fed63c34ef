// Elements of 8 bits as float16, for the emulator: see cpp/device/widen.cuh.
#pragma once

#include "cuda_fp16.h"
#include "cuda_runtime.h"

namespace kvblock {

enum class TwoOf { kLow, kHigh, kEven, kOdd };

template <typename Value, TwoOf kWhich>
uint32_t WidenTwo(uint32_t four, Value value) {
  const int first = kWhich == TwoOf::kHigh ? 2 : kWhich == TwoOf::kOdd ? 1 : 0;
  const int second = kWhich == TwoOf::kLow ? 1 : kWhich == TwoOf::kEven ? 2 : 3;
  const auto bits = [&](int i) { return __half(value(four >> 8 * i & 0xff)).bits; };
  return bits(first) | static_cast<uint32_t>(bits(second)) << 16;
}

// A float of so many bits of exponent, and so many behind the point.
inline float SmallFloat(int bits, int digits, int bias) {
  const int exponent = (bits & 0x7f) >> digits, rest = bits & ((1 << digits) - 1);
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(rest), 1 - bias - digits)
                                   : std::ldexp(static_cast<float>((1 << digits) + rest),
                                                exponent - bias - digits);
  return bits & 0x80 ? -size : size;
}

inline float ReadE4m3(int x) { return (x & 0x7f) == 0x7f ? NAN : SmallFloat(x, 3, 7); }
struct E4m3 {
  template <TwoOf kWhich>
  static uint32_t Widen(uint32_t four) {
    return WidenTwo<float (*)(int), kWhich>(four, ReadE4m3);
  }
};
struct E5m2 {
  template <TwoOf kWhich>
  static uint32_t Widen(uint32_t four) {
    return WidenTwo<float (*)(int), kWhich>(four, [](int x) {
      if ((x & 0x7f) >= 0x7c) return (x & 3) ? NAN : x & 0x80 ? -INFINITY : INFINITY;
      return SmallFloat(x, 2, 15);
    });
  }
};
struct Int8 {
  template <TwoOf kWhich>
  static uint32_t Widen(uint32_t four) {
    return WidenTwo<float (*)(int), kWhich>(
        four, [](int x) { return static_cast<float>(static_cast<int8_t>(x)); });
  }
};

}  // namespace kvblock
