// RMSNorm of a matrix, or of the sum of two, to 8 bits, in both orders, as a CUDA kernel
// (kvblock/norm_cast.h; sm_90).
//
// A cluster has 32 rows, a CTA of it 512 columns of them for each of kSquares: a thread has a
// square of 8 by 8 numbers in every 512 columns, and keeps it in registers, as it is stored, from
// the only load on. A warp has 32 rows and 64 columns: eight threads side by side read 128 bytes of
// a row (of 16 bits) and write 64 bytes of its codes; four, one below the other, write 32 bytes of
// a column's. All are whole sectors of 32 bytes.
//
// Squares are added up over a thread's columns, over a warp by shuffles, over a CTA in shared
// memory, and over the cluster: every CTA sends its sums to all, and waits for those of all at a
// barrier of its own, which counts their bytes. So no thread waits for its own writes to arrive,
// and a CTA may end as soon as it is done: it has been sent all that it will be.
#pragma once

#include <cstdint>

#include "device/cluster.cuh"
#include "device/mbarrier.cuh"
#include "device/shared.cuh"
#include "device/tensor_copy.cuh"
#include "kvblock/norm_cast.h"
#include "ops/cast/squares.cuh"

namespace kvblock {

constexpr int kNormRows = KVBLOCK_NORM_CAST_ROWS, kNormColumns = KVBLOCK_NORM_CAST_COLUMNS;
// Squares of a warp, side by side; the others lie below them.
constexpr int kNormWide = 8;
static_assert(32 / kNormWide * kCastSquare == kNormRows && kNormRows == 32);
static_assert(kCastWarps * kNormWide * kCastSquare == kNormColumns);
// A warp sends sums to a CTA.
static_assert(KVBLOCK_NORM_CAST_PARTS <= kCastWarps);

// How many CTAs a multiprocessor is to have: numbers of 64 KiB in all, in half of its registers.
template <typename T, int kSquares>
constexpr int kNormCtas = 8 / (static_cast<int>(sizeof(T)) * kSquares);

struct NormCastParams {
  const void *x, *residual, *gamma;
  const float* scale;
  void* sum;
  uint8_t *out, *transposed;
  float *largest, *inverse_rms;
  int32_t rows, columns;
  int32_t parts;    // CTAs of a cluster
  bool wide_gamma;  // float32
  float eps;
};

struct NormShared {
  uint64_t all_sums;  // a barrier: of_ctas is there
  float of_warps[kCastWarps][kNormRows], of_ctas[KVBLOCK_NORM_CAST_PARTS][kNormRows];
  float inverses[kCastWarps][kNormRows];  // each warp's own
  float sizes[kCastWarps];
};

// The lane's part of eight sums over eight lanes side by side: lane i has the i-th.
__device__ __forceinline__ float SumOverEight(float (&sums)[kCastSquare]) {
#pragma unroll
  for (int step = kCastSquare / 2; step > 0; step /= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < step; ++i) {
      const float given = upper ? sums[i] : sums[i + step];
      const float kept = upper ? sums[i + step] : sums[i];
      sums[i] = kept + __shfl_xor_sync(0xffffffff, given, step);
    }
  }
  return sums[0];
}

template <typename T, int kFormat, int kSquares>
__global__ void __launch_bounds__(kCastThreads, kNormCtas<T, kSquares>)
    NormCast(const __grid_constant__ NormCastParams p) {
  auto& shared = DynamicSharedAs<NormShared>();
  const auto address = [](const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
  };
  if (threadIdx.x == 0) {
    BarrierInit(address(&shared.all_sums), 1);
    FenceBarrierInit();
    BarrierExpect(address(&shared.all_sums), p.parts * kNormRows * static_cast<int>(sizeof(float)));
  }
  ClusterArrive();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = ClusterRank(), tile = blockIdx.x / p.parts;
  const int row = tile * kNormRows + lane / kNormWide * kCastSquare;
  const int column =
      rank * (kSquares * kNormColumns) + (warp * kNormWide + lane % kNormWide) * kCastSquare;
  const int64_t first = int64_t{row} * p.columns + column;
  // Rows and columns are multiples of 16: a square is within the matrix, or none of it is.
  bool within[kSquares];
#pragma unroll
  for (int s = 0; s < kSquares; ++s) {
    within[s] = row < p.rows && column + s * kNormColumns < p.columns;
  }

  Eight<T> held[kSquares][kCastSquare];
  const auto at = [&](int s, int i) { return first + int64_t{i} * p.columns + s * kNormColumns; };
#pragma unroll
  for (int s = 0; s < kSquares; ++s) {
    if (!within[s]) continue;
#pragma unroll
    for (int i = 0; i < kCastSquare; ++i) {
      held[s][i] = LoadEight(static_cast<const T*>(p.x) + at(s, i));
    }
  }
  if (p.residual != nullptr) {
    // All are loaded before one is stored: the sum may lie where the residual does, so that the
    // compiler changes no order.
#pragma unroll
    for (int s = 0; s < kSquares; ++s) {
      if (!within[s]) continue;
#pragma unroll
      for (int i = 0; i < kCastSquare; ++i) {
        float numbers[kCastSquare], others[kCastSquare];
        Widen(LoadEight(static_cast<const T*>(p.residual) + at(s, i)), others);
        Widen(held[s][i], numbers);
#pragma unroll
        for (int j = 0; j < kCastSquare; ++j) numbers[j] += others[j];
        held[s][i] = RoundEight<T>(numbers);
      }
    }
#pragma unroll
    for (int s = 0; s < kSquares; ++s) {
      if (!within[s]) continue;
#pragma unroll
      for (int i = 0; i < kCastSquare; ++i) {
        StoreEight(static_cast<T*>(p.sum) + at(s, i), held[s][i]);
      }
    }
  }

  float sums[kCastSquare] = {};
#pragma unroll
  for (int s = 0; s < kSquares; ++s) {
    if (!within[s]) continue;
#pragma unroll
    for (int i = 0; i < kCastSquare; ++i) {
      float numbers[kCastSquare];
      Widen(held[s][i], numbers);
#pragma unroll
      for (int j = 0; j < kCastSquare; ++j) sums[i] = fmaf(numbers[j], numbers[j], sums[i]);
    }
  }
  shared.of_warps[warp][lane] = SumOverEight(sums);  // of the tile's row `lane`
  __syncthreads();
  ClusterWait();
  if (warp < p.parts) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kCastWarps; ++i) sum += shared.of_warps[i][lane];
    if (p.parts == 1) {
      shared.of_ctas[0][lane] = sum;  // a CTA alone has nobody to send to
    } else {
      SendFloat(address(&shared.of_ctas[rank][lane]), sum, address(&shared.all_sums), warp);
    }
  }
  if (p.parts == 1) {
    __syncthreads();
  } else {
    ClusterBarrierWait(address(&shared.all_sums), 0);
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < KVBLOCK_NORM_CAST_PARTS; ++i) {
    if (i < p.parts) sum += shared.of_ctas[i][lane];
  }
  const float inverse = 1.0f / sqrtf(sum / static_cast<float>(p.columns) + p.eps);
  if (p.inverse_rms != nullptr && rank == 0 && warp == 0 && tile * kNormRows + lane < p.rows) {
    p.inverse_rms[tile * kNormRows + lane] = inverse;
  }
  shared.inverses[warp][lane] = inverse;
  __syncwarp();

  float largest = 0.0f;
  const float scale = __ldg(p.scale);
#pragma unroll
  for (int s = 0; s < kSquares; ++s) {
    if (!within[s]) continue;
    const int of_square = column + s * kNormColumns;
    float gamma[kCastSquare];
    if (p.wide_gamma) {
      Widen(LoadEight(static_cast<const float*>(p.gamma) + of_square), gamma);
    } else {
      Widen(LoadEight(static_cast<const T*>(p.gamma) + of_square), gamma);
    }
    CodeSquare codes;
#pragma unroll
    for (int i = 0; i < kCastSquare; ++i) {
      float numbers[kCastSquare];
      Widen(held[s][i], numbers);
      const float factor = shared.inverses[warp][lane / kNormWide * kCastSquare + i];
#pragma unroll
      for (int j = 0; j < kCastSquare; ++j) {
        numbers[j] = numbers[j] * factor * gamma[j];
        largest = MaxOrNan(largest, fabsf(numbers[j]));
        numbers[j] *= scale;
      }
      codes.Round<kFormat>(i, numbers);
    }
    if (p.out != nullptr) codes.Store(p.out + at(s, 0), p.columns);
    if (p.transposed != nullptr) {
      codes.StoreTransposed(p.transposed + int64_t{of_square} * p.rows + row, p.rows);
    }
  }

  largest = LargestOfCta(largest, shared.sizes);
  if (threadIdx.x == 0) p.largest[blockIdx.x] = largest;
}

}  // namespace kvblock
