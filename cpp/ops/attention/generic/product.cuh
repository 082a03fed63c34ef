// One warp's part of a matrix product between two tiles in shared memory.
#pragma once

#include <cstdint>

#include "device/ldmatrix.cuh"
#include "device/mma.cuh"
#include "device/opaque.cuh"
#include "ops/attention/generic/tile.cuh"

namespace kvblock::generic {

// How an operand lies in its tile: with the summed dimension along the rows' bytes, or down them.
enum class Lies { kAcross, kDown };

// Sixteen columns of B (or rows of A) of a tile, over the summed dimension.
template <typename Tile, Lies kLies, BlockOrder kAcrossOrder>
struct Operand {
  static constexpr bool kAcross = kLies == Lies::kAcross;
  static constexpr BlockOrder kOrder =
      kAcross ? kAcrossOrder
              : (kAcrossOrder == BlockOrder::kRowsFirst ? BlockOrder::kColumnsFirst
                                                        : BlockOrder::kRowsFirst);
  uint32_t base;
  int first;  // the first row of A or column of B

  __device__ __forceinline__ void Load(uint32_t (&r)[4], int lane, int block, int k) const {
    const LaneBlock<Tile::kDim, kOrder> at(lane);
    if constexpr (kAcross) {
      LoadMatrices(r, at.Address(base, first + block * 16, k * 16));
    } else {
      LoadMatricesTransposed(r, at.Address(base, k * 16, first + block * 16));
    }
  }
};

template <typename Tile, Lies kLies>
using OperandA = Operand<Tile, kLies, BlockOrder::kRowsFirst>;
template <typename Tile, Lies kLies>
using OperandB = Operand<Tile, kLies, BlockOrder::kColumnsFirst>;

// c += A B over 16 kSteps of the summed dimension, for 16 kM rows and 8 kN columns. The fragments
// of step k + 1 are loaded before the products of step k start; between(k) runs after they have,
// and its arithmetic fills the time that the tensor cores take.
template <typename T, int kSteps, int kM, int kN, typename A, typename B, typename Between>
__device__ __forceinline__ void Product(float (&c)[kM][kN][4], const A& a, const B& b, int lane,
                                        const Between& between) {
  static_assert(kN % 2 == 0);
  lane = Opaque(lane);  // a dozen addresses, better computed anew than kept beside the sums
  uint32_t fa[2][kM][4], fb[2][kN / 2][4];
  const auto load = [&](int k) {
#pragma unroll
    for (int m = 0; m < kM; ++m) a.Load(fa[k % 2][m], lane, m, k);
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) b.Load(fb[k % 2][n], lane, n, k);
  };
  load(0);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    if (k + 1 < kSteps) load(k + 1);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        Mma16x8x16<T>(c[m][n], fa[k % 2][m], fb[k % 2][n / 2][n % 2 * 2],
                      fb[k % 2][n / 2][n % 2 * 2 + 1]);
      }
    }
    between(k);
  }
}

template <typename T, int kSteps, int kM, int kN, typename A, typename B>
__device__ __forceinline__ void Product(float (&c)[kM][kN][4], const A& a, const B& b, int lane) {
  Product<T, kSteps>(c, a, b, lane, [](int) {});
}

template <int kM, int kN>
__device__ __forceinline__ void Clear(float (&c)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0.0f;
  }
}

}  // namespace kvblock::generic
