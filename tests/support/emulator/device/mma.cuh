// Matrix products for the emulator, with the fragments that cpp/device/mma.cuh describes.
#pragma once

#include <array>
#include <type_traits>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"

namespace kvblock {

// The two halves of a word as float32.
template <typename T>
inline float Half(uint32_t word, int which) {
  T x;
  x.bits = static_cast<uint16_t>(word >> which * 16);
  return x;
}

template <typename T>
inline void Mma16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  // A lane shows its four pairs of A and its two of B.
  std::array<uint32_t, 12> own;
  for (int i = 0; i < 4; ++i) {
    for (int half = 0; half < 2; ++half) own[i * 2 + half] = emulator::Bits(Half<T>(a[i], half));
  }
  for (int half = 0; half < 2; ++half) {
    own[8 + half] = emulator::Bits(Half<T>(b0, half));
    own[10 + half] = emulator::Bits(Half<T>(b1, half));
  }
  const auto shown = emulator::Show(own);
  const int lane = threadIdx.x % 32;
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4, below = e / 2, column = lane % 4 * 2 + e % 2;
    float sum = 0.0f;
    for (int right = 0; right < 2; ++right) {  // of A's columns, and B's rows
      for (int pair = 0; pair < 4; ++pair) {
        const uint32_t* of_a = shown[row * 4 + pair] + (below + right * 2) * 2;
        const uint32_t* of_b = shown[column * 4 + pair] + 8 + right * 2;
        sum += emulator::Float(of_a[0]) * emulator::Float(of_b[0]);
        sum += emulator::Float(of_a[1]) * emulator::Float(of_b[1]);
      }
    }
    c[e] += sum;
  }
}

// TF32 of a register: the tensor cores do not look at its lower 13 bits.
inline float ReadTf32(uint32_t word) { return emulator::Float(word & 0xffffe000u); }

// Rounded towards zero, as the tensor cores round.
inline float Truncate(double x) {
  const float near = static_cast<float>(x);
  return std::fabs(near) > std::fabs(x) ? std::nextafter(near, 0.0f) : near;
}

inline void Mma16x8x8(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto shown = emulator::Show(std::array<uint32_t, 6>{a[0], a[1], a[2], a[3], b0, b1});
  const int lane = threadIdx.x % 32;
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4, below = e / 2, column = lane % 4 * 2 + e % 2;
    double sum = c[e];
    for (int k = 0; k < 8; ++k) {  // A's column, and B's row
      sum += double{ReadTf32(shown[row * 4 + k % 4][k / 4 * 2 + below])} *
             ReadTf32(shown[column * 4 + k % 4][4 + k / 4]);
    }
    c[e] = Truncate(sum);
  }
}

template <typename T>
inline uint32_t Pack(float low, float high) {
  const T x[2] = {T(low), T(high)};
  return x[0].bits | static_cast<uint32_t>(x[1].bits) << 16;
}
template <typename T>
inline float2 Unpack(uint32_t pair) {
  return {Half<T>(pair, 0), Half<T>(pair, 1)};
}

}  // namespace kvblock
