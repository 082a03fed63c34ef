// What stands for a piece of queries or keys, as a CUDA kernel (kvblock/select.h).
//
// A CTA has a piece, or some of its columns: each thread as many side by side as 16 bytes hold, all
// of its rows. So a warp reads whole lines, and x is read once, whatever is wanted.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/special.cuh"
#include "kvblock/select.h"

namespace kvblock {

constexpr int kPoolThreads = 128;
constexpr int kPoolAhead = 8;  // rows whose reads are under way

struct PoolPiecesParams {
  const void* x;
  const int32_t* ends;
  void* means;
  float *largest, *smallest;
  int32_t length, width, side, pieces;
  bool rounded;  // means are of x's dtype
};

template <typename T>
constexpr int kPoolColumns = 16 / static_cast<int>(sizeof(T));

template <int kColumns>
__device__ __forceinline__ void StoreFloats(float* to, const float (&numbers)[kColumns]) {
#pragma unroll
  for (int i = 0; i < kColumns; i += 4) {
    *reinterpret_cast<float4*>(to + i) =
        make_float4(numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]);
  }
}

// Rounds to what 16 bytes hold.
template <typename T, int kColumns>
__device__ __forceinline__ void StoreRounded(T* to, const float (&numbers)[kColumns]) {
  union {
    uint4 piece;
    T numbers[kColumns];
  } rounded;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) rounded.numbers[i] = T(numbers[i]);
  *reinterpret_cast<uint4*>(to) = rounded.piece;
}

// kExtremes: whether the largest and smallest numbers are wanted.
template <typename T, bool kExtremes>
__global__ void __launch_bounds__(kPoolThreads)
    PoolPieces(const __grid_constant__ PoolPiecesParams p) {
  constexpr int kColumns = kPoolColumns<T>;
  const int column = (blockIdx.y * kPoolThreads + threadIdx.x) * kColumns;
  if (column >= p.width) return;
  const int member = blockIdx.x / p.pieces, piece = blockIdx.x % p.pieces;
  const int end = p.ends == nullptr ? p.length : min(max(p.ends[member], 0), p.length);
  const int first = piece * p.side, last = min(first + p.side, end);
  const T* const x = static_cast<const T*>(p.x) + int64_t{member} * p.length * p.width + column;

  float sum[kColumns], high[kColumns], low[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    sum[i] = 0.0f;
    high[i] = -INFINITY;
    low[i] = INFINITY;
  }
  for (int row = first; row < last; row += kPoolAhead) {
    union {
      uint4 piece;
      T numbers[kColumns];
    } rows[kPoolAhead];
#pragma unroll
    for (int j = 0; j < kPoolAhead; ++j) {
      if (row + j >= last) break;
      rows[j].piece = __ldcs(reinterpret_cast<const uint4*>(x + int64_t{row + j} * p.width));
    }
#pragma unroll
    for (int j = 0; j < kPoolAhead; ++j) {
      if (row + j >= last) break;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const float number = static_cast<float>(rows[j].numbers[i]);
        sum[i] += number;
        if constexpr (kExtremes) {
          high[i] = MaxOrNan(high[i], number);
          low[i] = -MaxOrNan(-low[i], -number);
        }
      }
    }
  }

  const int count = max(last - first, 0);
  const int64_t to = int64_t{blockIdx.x} * p.width + column;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    sum[i] /= max(count, 1);
    if (count == 0) high[i] = low[i] = 0.0f;
  }
  if (p.rounded) {
    StoreRounded(static_cast<T*>(p.means) + to, sum);
  } else {
    StoreFloats(static_cast<float*>(p.means) + to, sum);
  }
  if constexpr (kExtremes) {
    StoreFloats(p.largest + to, high);
    StoreFloats(p.smallest + to, low);
  }
}

}  // namespace kvblock
