// Matrix products for the emulator, with the fragments that cpp/device/mma.cuh describes.
#pragma once

#include <type_traits>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"

namespace kvblock {

template <typename T>
inline float Half(uint32_t word, int which) {
  T x;
  x.bits = static_cast<uint16_t>(word >> which * 16);
  return x;
}

template <typename T>
inline void Mma16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto shown = emulator::Show({a[0], a[1], a[2], a[3], b0, b1});
  const int lane = threadIdx.x % 32;
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    float sum = 0.0f;
    for (int k = 0; k < 16; ++k) {
      const auto& of_a = shown[row % 8 * 4 + k % 8 / 2];
      const auto& of_b = shown[column * 4 + k % 8 / 2];
      sum += Half<T>(of_a[row / 8 + k / 8 * 2], k % 2) * Half<T>(of_b[4 + k / 8], k % 2);
    }
    c[e] += sum;
  }
}

template <typename T>
inline uint32_t Pack(float low, float high) {
  const T x[2] = {T(low), T(high)};
  return x[0].bits | static_cast<uint32_t>(x[1].bits) << 16;
}

}  // namespace kvblock
