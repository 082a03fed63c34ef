// Warpgroup products for the emulator, done when they are issued: see cpp/device/wgmma.cuh.
#pragma once

#include <type_traits>

#include "cuda_runtime.h"
#include "device/swizzle.cuh"
#include "device/widen.cuh"

namespace kvblock {

inline void WgmmaFence() {}
inline void WgmmaCommit() { emulator::races::Commit(emulator::races::Engine::kProducts); }
template <int kPending>
inline void WgmmaWait() {
  emulator::races::Await(emulator::races::Engine::kProducts, kPending);
}
inline void WgmmaWaitApart() { WgmmaWait<0>(); }
template <int kCount>
inline void KeepAfter(float (&)[kCount]) {}

// Element (row, column) of an operand that begins at `operand`; rows are 128 bytes apart, chunks of
// 64 columns as far as it says.
EMULATOR_UNSEEN inline char* OperandPlace(uint64_t operand, int row, int column) {
  const uint32_t start = static_cast<uint32_t>(operand & 0x3fff) << 4;
  const uint32_t chunk = static_cast<uint32_t>(operand >> 16 & 0x3fff) << 4;
  const uint32_t place =
      start + column / kChunkColumns * chunk + row * kChunkRowBytes + column % kChunkColumns * 2;
  return emulator::SharedPointer(place ^ (place >> 7 & 7) << 4);
}
template <typename T>
EMULATOR_UNSEEN float OperandElement(uint64_t operand, int row, int column) {
  T x;
  std::memcpy(&x, OperandPlace(operand, row, column), 2);
  return static_cast<float>(x);
}

// The bytes of elements of 8 bits as numbers.
inline const float* const narrow_values = [] {
  static float all[256];
  for (int bits = 0; bits < 256; ++bits) all[bits] = ReadE4m3(bits);
  return all;
}();
// A row of an operand of 8 bits, as much of it as a product takes: it lies across.
using NarrowRow = float[32];
EMULATOR_UNSEEN inline void ReadNarrow(uint64_t operand, int row, NarrowRow& to) {
  for (int k = 0; k < 32; ++k) {
    uint8_t bits;
    std::memcpy(&bits, OperandPlace(operand, row, k / 2) + k % 2, 1);
    to[k] = narrow_values[bits];
  }
}

// A product of this warp reads a part of an operand.
inline void ReadOperand(uint64_t operand, int row, int rows, int columns, int first_column = 0) {
  using namespace emulator::races;
  for (int i = 0; i < rows; ++i) {
    for (int column = 0; column < columns; column += 8) {
      const char* const from = OperandPlace(operand, row + i, first_column + column);
      Start(Engine::kProducts, Access::kRead, from, 16);
    }
  }
}

template <int kN>
struct Wgmma {
  template <typename T, OperandLies kLies>
  EMULATOR_UNSEEN static float B(uint64_t b, int k, int n) {
    return kLies == OperandLies::kAcross ? OperandElement<T>(b, n, k) : OperandElement<T>(b, k, n);
  }

  template <OperandLies kLies>
  static void ReadB(uint64_t b) {
    constexpr bool kAcross = kLies == OperandLies::kAcross;
    ReadOperand(b, 0, kAcross ? kN : 16, kAcross ? 16 : kN);
  }

  // rows[half][k]: A of this lane's two rows.
  template <typename T, OperandLies kB>
  EMULATOR_UNSEEN static void Multiply(float (&d)[kN / 2], const float (&rows)[2][16], uint64_t b,
                                       bool accumulate) {
    const int lane = threadIdx.x % 32;
    for (int n = 0; n < kN / 8; ++n) {
      for (int e = 0; e < 2; ++e) {
        float sum[2] = {};
        for (int k = 0; k < 16; ++k) {
          const float x = B<T, kB>(b, k, n * 8 + lane % 4 * 2 + e);
          for (int half = 0; half < 2; ++half) sum[half] += rows[half][k] * x;
        }
        for (int half = 0; half < 2; ++half) {
          float& to = d[n * 4 + half * 2 + e];
          to = accumulate ? to + sum[half] : sum[half];
        }
      }
    }
  }

  // The same of 8 bits.
  EMULATOR_UNSEEN static void MultiplyNarrow(float (&d)[kN / 2], const NarrowRow (&rows)[2],
                                             uint64_t b, bool accumulate) {
    const int lane = threadIdx.x % 32;
    for (int n = 0; n < kN / 8; ++n) {
      for (int e = 0; e < 2; ++e) {
        NarrowRow column;
        ReadNarrow(b, n * 8 + lane % 4 * 2 + e, column);
        float sum[2] = {};
        for (int k = 0; k < 32; ++k) {
          for (int half = 0; half < 2; ++half) sum[half] += rows[half][k] * column[k];
        }
        for (int half = 0; half < 2; ++half) {
          float& to = d[n * 4 + half * 2 + e];
          to = accumulate ? to + sum[half] : sum[half];
        }
      }
    }
  }

  template <typename T, OperandLies kA = OperandLies::kAcross,
            OperandLies kB = OperandLies::kAcross>
  static void Shared(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate = true) {
    emulator::MeetForProduct();
    const int first = threadIdx.x % 128 / 32 * 16, row = first + threadIdx.x % 32 / 4;
    if (emulator::races::StartProduct()) {
      if constexpr (kA == OperandLies::kAcross) {
        ReadOperand(a, first, 16, 16);
      } else {
        ReadOperand(a, 0, 16, 16, first);
      }
      ReadB<kB>(b);
    }
    if constexpr (std::is_same_v<T, E4m3>) {
      static_assert(kA == OperandLies::kAcross && kB == OperandLies::kAcross);
      NarrowRow rows[2];
      for (int half = 0; half < 2; ++half) ReadNarrow(a, row + half * 8, rows[half]);
      MultiplyNarrow(d, rows, b, accumulate);
    } else {
      float rows[2][16];
      for (int half = 0; half < 2; ++half) {
        for (int k = 0; k < 16; ++k) {
          rows[half][k] = kA == OperandLies::kAcross ? OperandElement<T>(a, row + half * 8, k)
                                                     : OperandElement<T>(a, k, row + half * 8);
        }
      }
      Multiply<T, kB>(d, rows, b, accumulate);
    }
  }

  template <typename T, OperandLies kB = OperandLies::kAcross>
  static void Registers(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b,
                        bool accumulate = true) {
    const auto shown = emulator::Show(std::array<uint32_t, 4>{a[0], a[1], a[2], a[3]});
    emulator::MeetForProduct();
    if (emulator::races::StartProduct()) ReadB<kB>(b);
    if constexpr (std::is_same_v<T, E4m3>) {
      static_assert(kB == OperandLies::kAcross);
      NarrowRow rows[2];
      for (int k = 0; k < 32; ++k) {
        const auto& of = shown[threadIdx.x % 32 / 4 * 4 + k % 16 / 4];
        for (int half = 0; half < 2; ++half) {
          rows[half][k] = narrow_values[of[k / 16 * 2 + half] >> (k % 4 * 8) & 0xff];
        }
      }
      MultiplyNarrow(d, rows, b, accumulate);
    } else {
      float rows[2][16];
      for (int k = 0; k < 16; ++k) {
        const auto& of = shown[threadIdx.x % 32 / 4 * 4 + k % 8 / 2];
        for (int half = 0; half < 2; ++half) {
          const uint16_t bits = static_cast<uint16_t>(of[k / 8 * 2 + half] >> (k % 2 * 16));
          T x;
          std::memcpy(&x, &bits, 2);
          rows[half][k] = static_cast<float>(x);
        }
      }
      Multiply<T, kB>(d, rows, b, accumulate);
    }
  }
};

}  // namespace kvblock
