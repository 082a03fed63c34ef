// Where the results of the backward kernel over keys go, from a warp's accumulators.
#pragma once

#include <cstdint>

#include "device/opaque.cuh"
#include "device/reduce_add.cuh"
#include "ops/attention/contract/params.cuh"
#include "ops/attention/generic/backward/kv_shape.cuh"
#include "ops/attention/generic/fragments.cuh"

namespace kvblock::generic {

// Where a score of a key lies in a row of a tile of scores. Of float32 the even keys of 8 come
// first and then the odd ones: ldmatrix reads four side by side, and those are to be the places t
// of a step that a lane has of K (fragments.cuh).
template <typename T>
__device__ __forceinline__ int KeyAt(int place) {
  if constexpr (!kIsFloat32<T>) return place;
  return place / 8 * 8 + place % 4 * 2 + place / 4 % 2;
}

// Adds a warp's part of dQ, from row `row` of the tile and column `column` on, to dq_accum.
template <typename T, typename Shape>
__device__ __forceinline__ void AddDq(const AttentionParams& p, const Sequence& s,
                                      const BackwardKeys& keys,
                                      const float (&dq)[Shape::kDqM][Shape::kDqN][4],
                                      const BackwardWalk::Tile& at, int row, int column, int lane) {
  constexpr int kDqM = Shape::kDqM, kDqN = Shape::kDqN;
  // All rows of a lane have the same place in their blocks: a tile's first is a multiple of 8.
  const int group_row = lane / 4, first = at.first + row;
  const unsigned in_block = keys.dq_row + group_row;
  // Of two blocks of 8 columns a lane has four neighbours, of float32; two of each, of 16 bits.
  const int own = kIsFloat32<T> ? lane % 4 / 2 * 64 + lane % 2 * 4 : lane % 4 * 2;
  float* to = keys.dq + at.head * keys.dq_stride + int64_t{first} * p.head_dim +
              in_block / 8 * 8 * p.head_dim + in_block % 8 * 8 + own + column * 8;
#pragma unroll
  for (int m = 0; m < kDqM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h, to += 8 * p.head_dim) {
      // Or every row computes two addresses from the start. At 256 it would cost a spill.
      if constexpr (Shape::kDim < 256) to = Opaque(to);
      if (first + m * 16 + h * 8 + group_row >= s.q_len) continue;
#pragma unroll
      for (int n = 0; n < kDqN; n += kIsFloat32<T> ? 2 : 1) {
        if constexpr (kIsFloat32<T>) {
          if (column + n * 8 + lane % 4 / 2 * 8 < p.head_dim) {
            ReduceAdd(to + n * 64, dq[m][n][2 * h], dq[m][n + 1][2 * h], dq[m][n][2 * h + 1],
                      dq[m][n + 1][2 * h + 1]);
          }
        } else if (column + n * 8 < p.head_dim) {
          ReduceAdd(to + n * 64, dq[m][n][2 * h], dq[m][n][2 * h + 1]);
        }
      }
    }
  }
}

// Puts a warp's parts of dK and dV, scaled, where K and V were, from key `row` of the tile and
// column `column` on.
template <typename T, typename Shape>
__device__ __forceinline__ void PlaceKv(const float (&dk)[Shape::kKvM][Shape::kKvN][4],
                                        const float (&dv)[Shape::kKvM][Shape::kKvN][4],
                                        char* shared, float scale, float value_scale, int row,
                                        int column, int lane) {
  using KeyTile = typename Shape::KeyTile;
  constexpr int kM = Shape::kKvM, kN = Shape::kKvN;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    if constexpr (kIsFloat32<T>) {
      constexpr int kWide = kWideOf<kN>;
#pragma unroll
      for (int i = 0; i < 4 * kN; ++i) {
        const int n = i / 4, e = i % 4;
        const uint32_t at = KeyTile::Offset(row + KeyAt<T>(RowDown<kM>(lane, m, e / 2)),
                                            column + ColumnDown<kWide>(lane, n, e % 2));
        *reinterpret_cast<float*>(shared + Shape::kK + at) = dk[m][n][e] * scale;
        *reinterpret_cast<float*>(shared + Shape::kV + at) = dv[m][n][e] * value_scale;
      }
    } else {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t at =
              KeyTile::Offset(row + lane / 4 + m * 16 + h * 8, column + n * 8) + lane % 4 * 4;
          *reinterpret_cast<uint32_t*>(shared + Shape::kK + at) =
              Pack<T>(dk[m][n][2 * h] * scale, dk[m][n][2 * h + 1] * scale);
          *reinterpret_cast<uint32_t*>(shared + Shape::kV + at) =
              Pack<T>(dv[m][n][2 * h] * value_scale, dv[m][n][2 * h + 1] * value_scale);
        }
      }
    }
  }
}

}  // namespace kvblock::generic
