// Warpgroup products for the emulator: see cpp/device/wgmma.cuh. They read operands when they are
// issued; sums come to registers when they are waited for.
#pragma once

#include <type_traits>

#include "cuda_runtime.h"
#include "device/swizzle.cuh"
#include "device/widen.cuh"

namespace kvblock {

inline emulator::Products& OwnProducts() { return emulator::cta->pending[threadIdx.x]; }
constexpr uint32_t kUnderWay = 0x7fedcba9;  // a NaN

inline void WgmmaFence() { OwnProducts().fenced = true; }
inline void WgmmaCommit() {
  ++OwnProducts().group;
  emulator::races::Commit(emulator::races::Engine::kProducts);
}
// Sums of which all is done come to their registers; NaN if somebody has changed these meanwhile,
// or an operand.
template <int kPending>
EMULATOR_UNSEEN inline void WgmmaWait() {
  emulator::races::Await(emulator::races::Engine::kProducts, kPending);
  emulator::Products& own = OwnProducts();
  own.fenced = false;
  const auto is_done = [&](const emulator::Sums& sums) {
    if (sums.group + kPending >= own.group) return false;
    bool kept = true;
    for (int i = 0; i < sums.count; ++i) kept &= emulator::Bits(sums.to[i]) == kUnderWay;
    const auto ends = [&](const emulator::Operand& a) {
      if (a.sums != sums.to) return false;
      kept &= std::equal(a.words, a.words + 4, a.at);
      return true;
    };
    own.operands.erase(std::remove_if(own.operands.begin(), own.operands.end(), ends),
                       own.operands.end());
    for (int i = 0; i < sums.count; ++i) sums.to[i] = kept ? sums.values[i] : NAN;
    return true;
  };
  own.sums.erase(std::remove_if(own.sums.begin(), own.sums.end(), is_done), own.sums.end());
}
// Where a product adds, until somebody waits for it.
template <int kCount>
EMULATOR_UNSEEN inline float (&SumsUnderWay(float (&d)[kCount])) [kCount] {
  emulator::Products& own = OwnProducts();
  const auto as_array = [](emulator::Sums& sums) -> float (&)[kCount] {
    return reinterpret_cast<float (&)[kCount]>(sums.values);
  };
  for (emulator::Sums& sums : own.sums) {
    if (sums.to == d && sums.count == kCount) {
      sums.group = own.group;
      return as_array(sums);
    }
    if (sums.to < d + kCount && d < sums.to + sums.count) {
      emulator::Die("two products under way have a part of their sums in common");
    }
  }
  if (!own.fenced) emulator::Die("a product of registers that nobody has fenced");
  own.sums.push_back({d, kCount, own.group});
  std::copy(d, d + kCount, own.sums.back().values);
  std::fill(d, d + kCount, emulator::Float(kUnderWay));
  return as_array(own.sums.back());
} inline void WgmmaWaitApart() {
  WgmmaWait<0>();
}
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
template <typename T>
EMULATOR_UNSEEN inline void ReadNarrow(uint64_t operand, int row, NarrowRow& to) {
  for (int k = 0; k < 32; ++k) {
    uint8_t bits;
    std::memcpy(&bits, OperandPlace(operand, row, k / 2) + k % 2, 1);
    to[k] = std::is_same_v<T, Int8> ? static_cast<int8_t>(bits) : narrow_values[bits];
  }
}
// What a product adds to, whose sum is exact of integers: these are in its bits.
template <typename T>
float Added(float to, float sum, bool accumulate) {
  if constexpr (std::is_same_v<T, Int8>) {
    const uint32_t before = accumulate ? emulator::Bits(to) : 0;
    return emulator::Float(before + static_cast<uint32_t>(static_cast<int32_t>(sum)));
  }
  return accumulate ? to + sum : sum;
}

// An operand of so many rows and columns, of 2 bytes, is one that the tensor cores can read: rows
// of a chunk begin at a multiple of 8 rows, where the swizzle begins, and do not go on beyond it.
EMULATOR_UNSEEN inline void CheckOperand(uint64_t operand, OperandLies lies, int rows,
                                         int columns) {
  const uint32_t start = static_cast<uint32_t>(operand & 0x3fff) << 4;
  const uint32_t chunk = static_cast<uint32_t>(operand >> 16 & 0x3fff) << 4;
  if (operand >> 32 != SharedOperand(0) >> 32) emulator::Die("an operand lies otherwise");
  if (lies == OperandLies::kAcross && start % 32 != 0) emulator::Die("an operand is not aligned");
  for (int n = 0; n * kChunkColumns < columns; ++n) {
    const uint32_t place = start + n * chunk, in_row = place % kChunkRowBytes;
    const uint32_t bytes = std::min(columns - n * kChunkColumns, kChunkColumns) * 2;
    if (place / kChunkRowBytes % 8 != 0) emulator::Die("an operand begins within 8 rows");
    if (in_row + bytes > kChunkRowBytes) emulator::Die("an operand goes on beyond its chunk");
    emulator::CheckShared(place - in_row, rows * kChunkRowBytes,
                          "an operand goes on beyond shared memory");
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
  template <OperandLies kLies, int kSize>
  static void Check(uint64_t operand) {
    constexpr bool kAcross = kLies == OperandLies::kAcross;
    CheckOperand(operand, kLies, kAcross ? kSize : 16, kAcross ? 16 : kSize);
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
  template <typename T>
  EMULATOR_UNSEEN static void MultiplyNarrow(float (&d)[kN / 2], const NarrowRow (&rows)[2],
                                             uint64_t b, bool accumulate) {
    const int lane = threadIdx.x % 32;
    for (int n = 0; n < kN / 8; ++n) {
      for (int e = 0; e < 2; ++e) {
        NarrowRow column;
        ReadNarrow<T>(b, n * 8 + lane % 4 * 2 + e, column);
        float sum[2] = {};
        for (int k = 0; k < 32; ++k) {
          for (int half = 0; half < 2; ++half) sum[half] += rows[half][k] * column[k];
        }
        for (int half = 0; half < 2; ++half) {
          float& to = d[n * 4 + half * 2 + e];
          to = Added<T>(to, sum[half], accumulate);
        }
      }
    }
  }

  template <typename T, OperandLies kA = OperandLies::kAcross,
            OperandLies kB = OperandLies::kAcross>
  static void Shared(float (&to)[kN / 2], uint64_t a, uint64_t b, bool accumulate = true) {
    emulator::MeetForProduct();
    Check<kA, 64>(a);
    Check<kB, kN>(b);
    float (&d)[kN / 2] = SumsUnderWay(to);
    const int first = threadIdx.x % 128 / 32 * 16, row = first + threadIdx.x % 32 / 4;
    if (emulator::races::StartProduct()) {
      if constexpr (kA == OperandLies::kAcross) {
        ReadOperand(a, first, 16, 16);
      } else {
        ReadOperand(a, 0, 16, 16, first);
      }
      ReadB<kB>(b);
    }
    if constexpr (std::is_same_v<T, E4m3> || std::is_same_v<T, Int8>) {
      static_assert(kA == OperandLies::kAcross && kB == OperandLies::kAcross);
      NarrowRow rows[2];
      for (int half = 0; half < 2; ++half) ReadNarrow<T>(a, row + half * 8, rows[half]);
      MultiplyNarrow<T>(d, rows, b, accumulate);
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
  static void Registers(float (&to)[kN / 2], const uint32_t (&a)[4], uint64_t b,
                        bool accumulate = true) {
    const auto shown = emulator::Show(std::array<uint32_t, 4>{a[0], a[1], a[2], a[3]});
    emulator::MeetForProduct();
    Check<kB, kN>(b);
    float (&d)[kN / 2] = SumsUnderWay(to);
    OwnProducts().operands.push_back({a, {a[0], a[1], a[2], a[3]}, to});
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
      MultiplyNarrow<T>(d, rows, b, accumulate);
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
