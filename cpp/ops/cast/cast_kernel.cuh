// A matrix to 8 bits, in both orders, as a CUDA kernel (kvblock/cast.h).
//
// A CTA has a tile of 128 rows and 256 columns, a thread two squares of 8 by 8 in it, side by side,
// all in registers. A warp has 64 rows and 64 columns: four threads side by side read 128 bytes of
// a row (of 16 bits) and write 64 bytes of its codes; eight, one below the other, write 64 bytes of
// a column's. The warps beside them have the rest of a line, so nothing goes through shared memory.
#pragma once

#include <cstdint>

#include "ops/cast/squares.cuh"

namespace kvblock {

// Squares of a thread, side by side; threads of a warp, below one another and side by side; warps
// of a CTA.
constexpr int kCastSquares = 2, kCastRun = kCastSquares * kCastSquare;
constexpr int kCastTall = 8, kCastWide = 4;
constexpr int kCastAbreast = KVBLOCK_CAST_TILE_COLUMNS / (kCastWide * kCastRun);
static_assert(kCastWarps / kCastAbreast * kCastTall * kCastSquare == KVBLOCK_CAST_TILE_ROWS);

struct CastParams {
  const void* x;
  const float* scale;
  uint8_t *out, *transposed;
  float* largest;
  int32_t rows, columns;
  int32_t tiles;  // side by side
};

// kOut, kTransposed: which orders are wanted.
template <typename T, int kFormat, bool kOut, bool kTransposed>
__global__ void __launch_bounds__(kCastThreads) Cast(const __grid_constant__ CastParams p) {
  __shared__ float of_warps[kCastWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tile_row = blockIdx.x / p.tiles, tile_column = blockIdx.x % p.tiles;
  const int row = tile_row * KVBLOCK_CAST_TILE_ROWS +
                  (warp / kCastAbreast * kCastTall + lane / kCastWide) * kCastSquare;
  const int column = tile_column * KVBLOCK_CAST_TILE_COLUMNS +
                     (warp % kCastAbreast * kCastWide + lane % kCastWide) * kCastRun;

  float largest = 0.0f;
  // Rows and columns are multiples of 16: both squares are within the matrix, or neither is.
  if (row < p.rows && column < p.columns) {
    const float scale = __ldg(p.scale);
    const T* const x = static_cast<const T*>(p.x) + int64_t{row} * p.columns + column;
    CodeSquare squares[kCastSquares];
#pragma unroll
    for (int i = 0; i < kCastSquare; ++i) {
#pragma unroll
      for (int s = 0; s < kCastSquares; ++s) {
        float numbers[kCastSquare];
        Widen(LoadEight(x + int64_t{i} * p.columns + s * kCastSquare), numbers);
#pragma unroll
        for (int j = 0; j < kCastSquare; ++j) {
          largest = MaxOrNan(largest, fabsf(numbers[j]));
          numbers[j] *= scale;
        }
        squares[s].Round<kFormat>(i, numbers);
      }
    }
    if constexpr (kOut) {
      StorePair(squares, p.out + int64_t{row} * p.columns + column, p.columns);
    }
    if constexpr (kTransposed) {
#pragma unroll
      for (int s = 0; s < kCastSquares; ++s) {
        const int64_t first = int64_t{column + s * kCastSquare} * p.rows;
        squares[s].StoreTransposed(p.transposed + first + row, p.rows);
      }
    }
  }

  largest = LargestOfCta(largest, of_warps);
  if (threadIdx.x == 0) p.largest[blockIdx.x] = largest;
}

}  // namespace kvblock
