// float16 for the emulator.
#pragma once

#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
  __half() = default;
  __half(float x) {  // NOLINT: as in CUDA
    const uint16_t sign = static_cast<uint16_t>(emulator::Bits(x) >> 16 & 0x8000);
    const float size = std::fabs(x);
    if (x != x) {
      bits = 0x7fff;
    } else if (size >= 65520.0f) {
      bits = sign | 0x7c00;
    } else if (size < 0x1p-14f) {  // in units of the smallest
      bits = sign | static_cast<uint16_t>(std::nearbyint(size * 0x1p24f));
    } else {
      int exponent;
      const float fraction = std::frexp(size, &exponent);                        // 0.5 to 1
      const auto digits = static_cast<int>(std::nearbyint(fraction * 2048.0f));  // 1024 to 2048
      bits = static_cast<uint16_t>(sign | ((exponent + 14) * 1024 + digits - 1024));
    }
  }
  EMULATOR_UNSEEN operator float() const;
};
namespace emulator {
inline const float* const halves = [] {
  static std::vector<float> all(1 << 16);
  for (int bits = 0; bits < 1 << 16; ++bits) {
    const int exponent = bits >> 10 & 31, digits = bits & 1023;
    const float size = exponent == 31  ? digits ? NAN : INFINITY
                       : exponent == 0 ? std::ldexp(static_cast<float>(digits), -24)
                                       : std::ldexp(1024.0f + digits, exponent - 25);
    all[bits] = bits & 0x8000 ? -size : size;
  }
  return all.data();
}();
}  // namespace emulator
inline __half::operator float() const { return emulator::halves[bits]; }
struct __half2 {
  __half x, y;
};
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
