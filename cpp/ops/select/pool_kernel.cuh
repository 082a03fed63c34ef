// What stands for a piece of queries or keys, as a CUDA kernel (kvblock/select.h).
//
// A CTA has a piece, or some of its columns: each thread as many side by side as 16 bytes hold, all
// of its rows. So a warp reads whole lines, and x is read once, whatever is wanted. The columns of
// a head that is normed are those of some lanes side by side.
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
  bool rounded;    // means are of x's dtype
  int32_t normed;  // columns of a head
};

// What is wanted: means; with the largest and smallest numbers; or all three normed, side by side.
enum class Pooled { kMeans, kExtremes, kNormed };

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

// Brings the numbers of a head, which `lanes` lanes side by side have, to a mean square of 1.
template <int kColumns>
__device__ __forceinline__ void Norm(float (&numbers)[kColumns], int lanes) {
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) square = fmaf(numbers[i], numbers[i], square);
  for (int step = 1; step < lanes; step *= 2) square += __shfl_xor_sync(~0u, square, step);
  const float mean = square / static_cast<float>(lanes * kColumns);
  const float factor = 1.0f / sqrtf(MaxOrNan(mean, 1e-30f));
#pragma unroll
  for (int i = 0; i < kColumns; ++i) numbers[i] *= factor;
}

template <typename T, Pooled kWanted>
__global__ void __launch_bounds__(kPoolThreads)
    PoolPieces(const __grid_constant__ PoolPiecesParams p) {
  constexpr int kColumns = kPoolColumns<T>;
  const int column = (blockIdx.y * kPoolThreads + threadIdx.x) * kColumns;
  const bool within = column < p.width;
  if (kWanted != Pooled::kNormed && !within) return;
  const int member = blockIdx.x / p.pieces, piece = blockIdx.x % p.pieces;
  const int end = p.ends == nullptr ? p.length : min(max(p.ends[member], 0), p.length);
  const int first = piece * p.side, last = within ? min(first + p.side, end) : 0;
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
        if constexpr (kWanted != Pooled::kMeans) {
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
  if constexpr (kWanted == Pooled::kNormed) {
    const int lanes = p.normed / kColumns;
    float* const of_head = static_cast<float*>(p.means) + 3 * (to - column % p.normed);
    float (*const parts[])[kColumns] = {&sum, &high, &low};
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      Norm(*parts[i], lanes);
      if (within) StoreFloats(of_head + i * p.normed + column % p.normed, *parts[i]);
    }
    return;
  }
  if (p.rounded) {
    StoreRounded(static_cast<T*>(p.means) + to, sum);
  } else {
    StoreFloats(static_cast<float*>(p.means) + to, sum);
  }
  if constexpr (kWanted == Pooled::kExtremes) {
    StoreFloats(p.largest + to, high);
    StoreFloats(p.smallest + to, low);
  }
}

}  // namespace kvblock
