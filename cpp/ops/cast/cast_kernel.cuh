// A matrix to 8 bits, in both orders, as a CUDA kernel (kvblock/cast.h).
//
// A CTA has a tile of 128 rows and 128 columns, a thread a square of 8 by 8 in it, all in
// registers. A warp has 64 rows and 32 columns: four threads side by side read 64 bytes of a row
// (of 16 bits) and write 32 bytes of its codes; eight, one below the other, write 64 bytes of a
// column's. Those are whole sectors of 32 bytes, and the warps beside them have the rest of a line,
// so nothing goes through shared memory. A square is transposed by byte permutations, 32 for its 64
// numbers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/narrow.cuh"
#include "device/special.cuh"
#include "kvblock/cast.h"

namespace kvblock {

constexpr int kCastThreads = 256, kCastWarps = kCastThreads / 32;
constexpr int kCastSquare = 8;
// Squares of a warp: below one another, and side by side.
constexpr int kCastTall = 8, kCastWide = 4;
// Warps of a CTA side by side; the others lie below them.
constexpr int kCastAbreast = KVBLOCK_CAST_TILE / (kCastWide * kCastSquare);
static_assert(kCastWarps / kCastAbreast * kCastTall * kCastSquare == KVBLOCK_CAST_TILE);

struct CastParams {
  const void* x;
  const float* scale;
  uint8_t *out, *transposed;
  float* largest;
  int32_t rows, columns;
  int32_t tiles;  // side by side
};

// Eight numbers that lie side by side, as float32.
__device__ __forceinline__ void LoadEight(const float* x, float (&numbers)[kCastSquare]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 four = reinterpret_cast<const float4*>(x)[half];
    numbers[4 * half] = four.x;
    numbers[4 * half + 1] = four.y;
    numbers[4 * half + 2] = four.z;
    numbers[4 * half + 3] = four.w;
  }
}
template <typename T>
__device__ __forceinline__ void LoadEight(const T* x, float (&numbers)[kCastSquare]) {
  union {
    uint4 bits;
    T eight[kCastSquare];
  } run;
  run.bits = *reinterpret_cast<const uint4*>(x);
#pragma unroll
  for (int i = 0; i < kCastSquare; ++i) numbers[i] = static_cast<float>(run.eight[i]);
}

template <int kFormat>
__device__ __forceinline__ uint32_t FourCodes(const float* x) {
  if constexpr (kFormat == KVBLOCK_CAST_E4M3) {
    return PairToE4m3(x[0], x[1]) | static_cast<uint32_t>(PairToE4m3(x[2], x[3])) << 16;
  } else {
    return PairToE5m2(x[0], x[1]) | static_cast<uint32_t>(PairToE5m2(x[2], x[3])) << 16;
  }
}

// Four words of four bytes: byte i of word j becomes byte j of word i.
__device__ __forceinline__ void TransposeBytes(uint32_t (&words)[4]) {
  const uint32_t low01 = __byte_perm(words[0], words[1], 0x5140);
  const uint32_t low23 = __byte_perm(words[2], words[3], 0x5140);
  const uint32_t high01 = __byte_perm(words[0], words[1], 0x7362);
  const uint32_t high23 = __byte_perm(words[2], words[3], 0x7362);
  words[0] = __byte_perm(low01, low23, 0x5410);
  words[1] = __byte_perm(low01, low23, 0x7632);
  words[2] = __byte_perm(high01, high23, 0x5410);
  words[3] = __byte_perm(high01, high23, 0x7632);
}

template <typename T, int kFormat>
__global__ void __launch_bounds__(kCastThreads) Cast(const __grid_constant__ CastParams p) {
  __shared__ float of_warps[kCastWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tile_row = blockIdx.x / p.tiles, tile_column = blockIdx.x % p.tiles;
  const int row = tile_row * KVBLOCK_CAST_TILE +
                  (warp / kCastAbreast * kCastTall + lane / kCastWide) * kCastSquare;
  const int column = tile_column * KVBLOCK_CAST_TILE +
                     (warp % kCastAbreast * kCastWide + lane % kCastWide) * kCastSquare;
  // Rows and columns are multiples of 16: a square is within the matrix, or none of it is.
  const bool within = row < p.rows && column < p.columns;

  float largest = 0.0f;
  if (within) {
    const float scale = __ldg(p.scale);
    const T* const x = static_cast<const T*>(p.x) + int64_t{row} * p.columns + column;
    uint32_t codes[2][kCastSquare];  // of a row the left four and the right four
#pragma unroll
    for (int i = 0; i < kCastSquare; ++i) {
      float numbers[kCastSquare];
      LoadEight(x + int64_t{i} * p.columns, numbers);
#pragma unroll
      for (int j = 0; j < kCastSquare; ++j) {
        largest = MaxOrNan(largest, fabsf(numbers[j]));
        numbers[j] *= scale;
      }
      codes[0][i] = FourCodes<kFormat>(numbers);
      codes[1][i] = FourCodes<kFormat>(numbers + 4);
    }
    if (p.out != nullptr) {
      uint8_t* const out = p.out + int64_t{row} * p.columns + column;
#pragma unroll
      for (int i = 0; i < kCastSquare; ++i) {
        *reinterpret_cast<uint2*>(out + int64_t{i} * p.columns) =
            make_uint2(codes[0][i], codes[1][i]);
      }
    }
    if (p.transposed != nullptr) {
      uint8_t* const out = p.transposed + int64_t{column} * p.rows + row;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t upper[4], lower[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          upper[i] = codes[half][i];
          lower[i] = codes[half][4 + i];
        }
        TransposeBytes(upper);
        TransposeBytes(lower);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          *reinterpret_cast<uint2*>(out + int64_t{4 * half + j} * p.rows) =
              make_uint2(upper[j], lower[j]);
        }
      }
    }
  }

#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    largest = MaxOrNan(largest, __shfl_xor_sync(0xffffffff, largest, step));
  }
  if (lane == 0) of_warps[warp] = largest;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 1; i < kCastWarps; ++i) largest = MaxOrNan(largest, of_warps[i]);
    p.largest[blockIdx.x] = largest;
  }
}

}  // namespace kvblock
