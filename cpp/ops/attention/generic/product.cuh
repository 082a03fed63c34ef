// One warp's part of a matrix product between two tiles in shared memory.
#pragma once

#include <cstdint>

#include "device/ldmatrix.cuh"
#include "device/opaque.cuh"
#include "ops/attention/generic/fragments.cuh"
#include "ops/attention/generic/tile.cuh"

namespace kvblock::generic {

// How an operand lies in its tile: with the summed dimension along the rows' bytes, or down them.
enum class Lies { kAcross, kDown };

// Columns of B (or rows of A) of a tile, over the summed dimension: 16 of them are two words (or
// four) of a lane for each step.
template <typename Tile, Lies kLies, BlockOrder kAcrossOrder>
struct Operand {
  static constexpr bool kAcross = kLies == Lies::kAcross;
  static constexpr bool kMatrices = kAcross || Tile::kElementBytes == 2;  // ldmatrix reads them
  static constexpr BlockOrder kOrder =
      kAcross ? kAcrossOrder
              : (kAcrossOrder == BlockOrder::kRowsFirst ? BlockOrder::kColumnsFirst
                                                        : BlockOrder::kRowsFirst);
  uint32_t base;
  int first;  // the first row of A or column of B

  // By ldmatrix: the words of step k of block `block` of 16.
  __device__ __forceinline__ void Load(uint32_t (&r)[4], int lane, int block, int k) const {
    const LaneBlock<Tile::kRowBytes / 2, kOrder> at(lane);
    if constexpr (kAcross) {
      LoadMatrices(r, at.Address(base, first + block * 16, k * 16));
    } else {
      LoadMatricesTransposed(r, at.Address(base, k * 16, first + block * 16));
    }
  }

  // The words of step k of A's kM blocks of 16 rows.
  template <int kM>
  __device__ __forceinline__ void LoadRows(uint32_t (&r)[kM][4], int lane, int k) const {
    if constexpr (kMatrices) {
#pragma unroll
      for (int m = 0; m < kM; ++m) Load(r[m], lane, m, k);
    } else {
      LoadDown<kWideOf<2 * kM>, 2 * kM>(lane, 0, k, [&](int block, uint32_t even, uint32_t odd) {
        r[block / 2][block % 2] = even;
        r[block / 2][2 + block % 2] = odd;
      });
    }
  }

  // The words of step k of B's kBlocks blocks of 8 columns from `block` on.
  template <int kBlocks>
  __device__ __forceinline__ void LoadColumns(uint32_t (&r)[kBlocks * 2], int lane, int block,
                                              int k) const {
    if constexpr (kMatrices) {
#pragma unroll
      for (int n = 0; n < kBlocks / 2; ++n) {
        uint32_t two[4];
        Load(two, lane, block / 2 + n, k);
#pragma unroll
        for (int i = 0; i < 4; ++i) r[n * 4 + i] = two[i];
      }
    } else {
      LoadDown<kBlocks, kBlocks>(lane, block * 8, k, [&](int j, uint32_t even, uint32_t odd) {
        r[j * 2] = even;
        r[j * 2 + 1] = odd;
      });
    }
  }

 private:
  // Calls take(block, of row 2 t, of row 2 t + 1) for kBlocks blocks of 8 columns, kWide at a time.
  template <int kWide, int kBlocks, typename Take>
  __device__ __forceinline__ void LoadDown(int lane, int column, int k, const Take& take) const {
    const LaneDown<Tile, kWide> at(lane);
#pragma unroll
    for (int block = 0; block < kBlocks; block += kWide) {
      uint32_t even[kWide], odd[kWide];
      at.Load(even, odd, base, k * 8, first + column + block * 8);
#pragma unroll
      for (int j = 0; j < kWide; ++j) take(block + j, even[j], odd[j]);
    }
  }
};

template <typename Tile, Lies kLies>
using OperandA = Operand<Tile, kLies, BlockOrder::kRowsFirst>;
template <typename Tile, Lies kLies>
using OperandB = Operand<Tile, kLies, BlockOrder::kColumnsFirst>;

template <int kM, int kN>
__device__ __forceinline__ void Clear(float (&c)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0.0f;
  }
}

// c += A B over kSteps steps of the summed dimension, for 16 kM rows and 8 kN columns. Fragments
// are loaded one round before their products start: of a step, or, of float32, of kWide blocks of
// columns of a step. between(k) runs after the products of step k have started, and its arithmetic
// fills the time that the tensor cores take. Where a product has small terms, those of all steps
// come first (kSumsApart).
template <typename T, int kSteps, int kWide = 0, Terms kTerms = Terms::kAll, int kM, int kN,
          typename A, typename B, typename Between>
__device__ __forceinline__ void Product(float (&c)[kM][kN][4], const A& a, const B& b, int lane,
                                        const Between& between) {
  if constexpr (kTerms == Terms::kAll && kSumsApart<T>) {
    Product<T, kSteps, kWide, Terms::kSmall>(c, a, b, lane, [](int) {});
    __syncwarp();  // or ptxas keeps what it has loaded, and spills it
    Product<T, kSteps, kWide, Terms::kLarge>(c, a, b, lane, between);
  } else {
    static_assert(kN % 2 == 0);
    constexpr int kBlocks = !kIsFloat32<T> ? kN : kWide != 0 ? kWide : kWideOf<kN>;
    constexpr int kParts = kN / kBlocks;  // of a step
    lane = Opaque(lane);  // a dozen addresses, better computed anew than kept beside the sums
    uint32_t loaded_a[2][kM][4], loaded_b[2][kBlocks * 2];
    const auto load = [&](int i) {
      const int k = i / kParts, part = i % kParts;
      if (part == 0) a.template LoadRows<kM>(loaded_a[k % 2], lane, k);
      b.template LoadColumns<kBlocks>(loaded_b[i % 2], lane, part * kBlocks, k);
    };
    Fragment<T, 4> rows[kM];
    load(0);
#pragma unroll
    for (int i = 0; i < kSteps * kParts; ++i) {
      const int k = i / kParts, part = i % kParts;
      if (i + 1 < kSteps * kParts) load(i + 1);
      if (part == 0) {
#pragma unroll
        for (int m = 0; m < kM; ++m) rows[m] = Prepare<T>(loaded_a[k % 2][m]);
      }
      MultiplyBlocks<T, kTerms, kM>(
          rows, Prepare<T>(loaded_b[i % 2]),
          [&](int m, int j) -> float (&)[4] { return c[m][part * kBlocks + j]; });
      if (part == kParts - 1) between(k);
    }
  }
}
template <typename T, int kSteps, int kWide = 0, int kM, int kN, typename A, typename B>
__device__ __forceinline__ void Product(float (&c)[kM][kN][4], const A& a, const B& b, int lane) {
  Product<T, kSteps, kWide>(c, a, b, lane, [](int) {});
}

// The same for sums over many tiles, of which this is one.
template <typename T, int kSteps, int kM, int kN, typename A, typename B>
__device__ __forceinline__ void AddProduct(float (&c)[kM][kN][4], const A& a, const B& b,
                                           int lane) {
  if constexpr (kSumsApart<T>) {
    float own[kM][kN][4];
    Clear(own);
    Product<T, kSteps>(own, a, b, lane);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) c[m][n][e] += own[m][n][e];
      }
    }
  } else {
    Product<T, kSteps>(c, a, b, lane);
  }
}

}  // namespace kvblock::generic
