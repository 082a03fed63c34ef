// RMSNorm of a matrix, or of the sum of two, to 8 bits, in both orders, as a CUDA kernel
// (kvblock/norm_cast.h; sm_90).
//
// A cluster has 32 rows, a CTA of it 512 or 1024 of their columns. They are in shared memory from
// the only load on, every thread's patch where that thread alone writes and reads it, so that few
// registers are taken and many CTAs share a multiprocessor: what one waits for hides behind others.
// In the end a warp's codes of the transpose lie where its numbers were.
//
// Squares are added up over a patch's columns, over a warp by shuffles, over a CTA in shared
// memory, and over the cluster: every CTA sends its sums to all, and waits for those of all at a
// barrier of its own, which counts their bytes. So no thread waits for its own writes to arrive,
// and a CTA may end as soon as it is done: it has been sent all that it will be.
#pragma once

#include <cstdint>

#include "device/cluster.cuh"
#include "device/cp_async.cuh"
#include "device/mbarrier.cuh"
#include "device/shared.cuh"
#include "device/tensor_copy.cuh"
#include "kvblock/norm_cast.h"
#include "ops/cast/patches.cuh"

namespace kvblock {

constexpr int kNormRows = KVBLOCK_NORM_CAST_ROWS;
// Warps of a CTA that lie below one another; the others lie beside them.
constexpr int kNormTall = kNormRows / kCastRows;
static_assert(kNormRows == 32);
template <int kThreads>
constexpr int kNormAbreast = kThreads / 32 / kNormTall;
static_assert(kNormAbreast<256> * kCastColumns == KVBLOCK_NORM_CAST_COLUMNS);

// How many CTAs a multiprocessor is to have. The more, the better what one waits for hides behind
// others; but pieces of a residual are in registers, eight of each thread at once, and then 128 KiB
// of numbers with more registers were faster than 192.
template <typename T, int kThreads, bool kSum>
constexpr int NormCtas() {
  const int ctas = (kSum ? 128 : 192) * 1024 / (64 * static_cast<int>(sizeof(T)) * kThreads);
  return ctas < 5 ? ctas : 5;
}

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

template <typename T, int kThreads>
struct NormShared {
  uint4 numbers[kThreads / 32][kPatchRows<T>][32];         // a patch's row i, of each lane
  uint4 gamma[kNormAbreast<kThreads> * kCastColumns / 4];  // as it is stored
  float of_warps[kThreads / 32][kCastRows];
  float of_ctas[KVBLOCK_NORM_CAST_PARTS][kNormRows];
  float sizes[kThreads / 32];
  uint64_t all_sums;  // a barrier: of_ctas is there
};

// The lane's part of kCount sums over twice as many lanes side by side: lane i, and the one kCount
// behind it, has the i-th.
template <int kCount, int kStep = kCount / 2>
__device__ __forceinline__ float SumOverLanes(float (&sums)[kCount]) {
  if constexpr (kStep > 0) {
    const bool upper = threadIdx.x & kStep;
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      const float given = upper ? sums[i] : sums[i + kStep];
      const float kept = upper ? sums[i + kStep] : sums[i];
      sums[i] = kept + __shfl_xor_sync(0xffffffff, given, kStep);
    }
    return SumOverLanes<kCount, kStep / 2>(sums);
  } else {
    return sums[0] + __shfl_xor_sync(0xffffffff, sums[0], kCount);
  }
}

// kSum: there is a residual.
template <typename T, int kFormat, int kThreads, bool kSum>
__global__ void __launch_bounds__(kThreads, NormCtas<T, kThreads, kSum>())
    NormCast(const __grid_constant__ NormCastParams p) {
  constexpr int kColumns = kPatchColumns<T>, kRows = kPatchRows<T>;  // of a patch
  constexpr int kAbreast = kNormAbreast<kThreads>, kWidth = kAbreast * kCastColumns;
  auto& shared = DynamicSharedAs<NormShared<T, kThreads>>();
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
  const int rank = ClusterRank(), first_row = ClusterIndex() * kNormRows;
  const int first_column = rank * kWidth;
  const int row_of_warp = warp / kAbreast * kCastRows;
  const int row = first_row + row_of_warp + PatchRow<T>();
  const int column_of_part = warp % kAbreast * kCastColumns + PatchColumn<T>();
  const int column = first_column + column_of_part;
  const int64_t first = int64_t{row} * p.columns + column;
  // Rows and columns are multiples of 16: a patch is within the matrix, or none of it is. Then its
  // numbers are zeros.
  const bool within = row < p.rows && column < p.columns;
  auto& numbers_of_warp = shared.numbers[warp];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    CopyAsync16(address(&numbers_of_warp[i][lane]),
                static_cast<const T*>(p.x) + first + int64_t{i} * p.columns, within);
  }
  // Gamma has as many bytes a number as x, or four.
  const int in_piece = p.wide_gamma ? 4 : kColumns, of_piece = threadIdx.x * in_piece;
  if (of_piece < kWidth) {
    const int at = first_column + of_piece;
    CopyAsync16(address(&shared.gamma[threadIdx.x]),
                static_cast<const char*>(p.gamma) + at * (16 / in_piece), at < p.columns);
  }
  CopyAsyncCommit();

  float sums[kRows] = {};
  const auto add_squares = [&](int i, const float (&numbers)[kColumns]) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) sums[i] = fmaf(numbers[j], numbers[j], sums[i]);
  };
  if constexpr (kSum) {
    // A row of the sum may lie where that of the residual does: it is stored after that is loaded.
    const T* const residual = static_cast<const T*>(p.residual) + first;
    T* const sum = static_cast<T*>(p.sum) + first;
    constexpr int kTogether = 8;
#pragma unroll
    for (int r = 0; r < kRows; r += kTogether) {
      uint4 others[kTogether] = {};
      if (within) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          others[i] = LoadPiece(residual + int64_t{r + i} * p.columns);
        }
      }
      if (r == 0) CopyAsyncWait<0>();
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        float numbers[kColumns], more[kColumns];
        Widen<T>(numbers_of_warp[r + i][lane], numbers);
        Widen<T>(others[i], more);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) numbers[j] += more[j];
        const uint4 rounded = RoundPiece<T>(numbers);
        numbers_of_warp[r + i][lane] = rounded;
        if (within) __stwb(reinterpret_cast<uint4*>(sum + int64_t{r + i} * p.columns), rounded);
        Widen<T>(rounded, numbers);
        add_squares(r + i, numbers);
      }
    }
  } else {
    CopyAsyncWait<0>();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float numbers[kColumns];
      Widen<T>(numbers_of_warp[i][lane], numbers);
      add_squares(i, numbers);
    }
  }

  const float of_lanes = SumOverLanes(sums);
  if (lane % kPatchesWide<T> < kRows) {
    shared.of_warps[warp][PatchRow<T>() + lane % kRows] = of_lanes;
  }
  __syncthreads();
  ClusterWait();
  if (warp < p.parts) {
    float sum = 0.0f;  // of the cluster's row `lane`
#pragma unroll
    for (int i = 0; i < kAbreast; ++i) {
      sum += shared.of_warps[lane / kCastRows * kAbreast + i][lane % kCastRows];
    }
    if (p.parts == 1) {
      shared.of_ctas[0][lane] = sum;  // a CTA alone has nobody to send to
    } else {
      for (int to = warp; to < p.parts; to += kThreads / 32) {
        SendFloat(address(&shared.of_ctas[rank][lane]), sum, address(&shared.all_sums), to);
      }
    }
  }
  if (p.parts == 1) {
    __syncthreads();
  } else {
    ClusterBarrierWait(address(&shared.all_sums), 0);
  }
  float sum = 0.0f;
  const int own = row_of_warp + lane % kCastRows;  // the row whose root this lane takes
  for (int i = 0; i < p.parts; ++i) sum += shared.of_ctas[i][own];
  const float inverse = 1.0f / sqrtf(sum / static_cast<float>(p.columns) + p.eps);
  if (p.inverse_rms != nullptr && rank == 0 && warp % kAbreast == 0 && lane < kCastRows &&
      first_row + own < p.rows) {
    p.inverse_rms[first_row + own] = inverse;
  }

  float largest = 0.0f;
  CodePatch<T> patch;
  const float scale = __ldg(p.scale);
  float gamma[kColumns];
  if (p.wide_gamma) {
    const float* const wide = reinterpret_cast<const float*>(shared.gamma) + column_of_part;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) gamma[j] = wide[j];
  } else {
    Widen<T>(LoadPiece(reinterpret_cast<const T*>(shared.gamma) + column_of_part), gamma);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float numbers[kColumns];
    Widen<T>(numbers_of_warp[i][lane], numbers);
    const float factor = __shfl_sync(0xffffffff, inverse, PatchRow<T>() + i);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      numbers[j] = numbers[j] * factor * gamma[j];
      largest = MaxOrNan(largest, fabsf(numbers[j]));
      numbers[j] *= scale;
    }
    patch.template Round<kFormat>(i, numbers);
  }
  // Zeros of a row that is not there may be NaN by now.
  if (!within) largest = 0.0f;
  if (within && p.out != nullptr) patch.Store(p.out + first, p.columns);
  const auto codes = [&](int of_warp) { return &shared.numbers[of_warp][0][0]; };
  if (p.transposed != nullptr) {
    __syncwarp();  // all lanes have read their numbers
    patch.StoreTransposed(codes(warp), warp / kAbreast * 4);
  }

  largest = LargestOfCta(largest, shared.sizes);
  if (threadIdx.x == 0) p.largest[ClusterIndex() * p.parts + rank] = largest;

  if (p.transposed != nullptr) {
    // After LargestOfCta, for which all have met. Two lanes have a column.
    const int below = threadIdx.x % kNormTall, to_row = first_row + below * kCastRows;
    if (to_row >= p.rows) return;
#pragma unroll
    for (int k = 0; k < kWidth; k += kThreads / kNormTall) {
      const int of_column = k + static_cast<int>(threadIdx.x) / kNormTall;
      if (first_column + of_column >= p.columns) break;
      uint8_t* const to = p.transposed + int64_t{first_column + of_column} * p.rows + to_row;
      *reinterpret_cast<uint4*>(to) = LoadTransposed<T>(
          codes(below * kAbreast + of_column / kCastColumns), of_column % kCastColumns, below * 4);
    }
  }
}

}  // namespace kvblock
