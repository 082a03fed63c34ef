// A matrix to 8 bits, in both orders, as a CUDA kernel (kvblock/cast.h).
//
// A CTA has a tile of 256 rows and 128 columns, its warps below one another. So every read and
// every write is of whole lines: of codes 128 bytes of a row, of the transpose 256 bytes of a
// column.
#pragma once

#include <cstdint>

#include "ops/cast/patches.cuh"

namespace kvblock {

constexpr int kCastWarps = KVBLOCK_CAST_TILE_ROWS / kCastRows, kCastThreads = 32 * kCastWarps;
static_assert(KVBLOCK_CAST_TILE_COLUMNS == kCastColumns);

struct CastParams {
  const void* x;
  const float* scale;
  uint8_t *out, *transposed;
  float* largest;
  int32_t rows, columns;
  int32_t tiles;  // side by side
};

// kOut, kTransposed: which orders are wanted. Two CTAs at a time keep a multiprocessor's reads and
// writes going.
template <typename T, int kFormat, bool kOut, bool kTransposed>
__global__ void __launch_bounds__(kCastThreads, 2) Cast(const __grid_constant__ CastParams p) {
  __shared__ float of_warps[kCastWarps];
  __shared__ uint4 codes[kCastWarps][kTransposed ? kCastColumns : 1];
  const int warp = threadIdx.x / 32;
  const int first_row = blockIdx.x / p.tiles * KVBLOCK_CAST_TILE_ROWS;
  const int first_column = blockIdx.x % p.tiles * kCastColumns;
  const int row = first_row + warp * kCastRows + PatchRow<T>();
  const int column = first_column + PatchColumn<T>();

  float largest = 0.0f;
  // Rows and columns are multiples of 16: a patch is within the matrix, or none of it is.
  if (row < p.rows && column < p.columns) {
    const float scale = __ldg(p.scale);
    const int64_t first = int64_t{row} * p.columns + column;
    const T* const x = static_cast<const T*>(p.x) + first;
    CodePatch<T> patch;
#pragma unroll
    for (int i = 0; i < kPatchRows<T>; ++i) {
      float numbers[kPatchColumns<T>];
      Widen<T>(LoadPiece(x + int64_t{i} * p.columns), numbers);
#pragma unroll
      for (int j = 0; j < kPatchColumns<T>; ++j) {
        largest = MaxOrNan(largest, fabsf(numbers[j]));
        numbers[j] *= scale;
      }
      patch.template Round<kFormat>(i, numbers);
    }
    if constexpr (kOut) patch.Store(p.out + first, p.columns);
    if constexpr (kTransposed) patch.StoreTransposed(codes[warp], warp % 8);
  }

  largest = LargestOfCta(largest, of_warps);
  if (threadIdx.x == 0) p.largest[blockIdx.x] = largest;

  if constexpr (kTransposed) {
    // After LargestOfCta, for which all have met. Sixteen lanes have a column.
    const int of = threadIdx.x % kCastWarps, to_row = first_row + of * kCastRows;
    if (to_row >= p.rows) return;
#pragma unroll
    for (int k = 0; k < kCastColumns; k += kCastThreads / kCastWarps) {
      const int of_column = k + static_cast<int>(threadIdx.x) / kCastWarps;
      if (first_column + of_column >= p.columns) break;
      uint8_t* const to = p.transposed + int64_t{first_column + of_column} * p.rows + to_row;
      *reinterpret_cast<uint4*>(to) = LoadTransposed<T>(codes[of], of_column, of % 8);
    }
  }
}

}  // namespace kvblock
