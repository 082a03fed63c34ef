// Patches of 64 numbers, each in one thread's registers: loaded, rounded to 8 bits, transposed by
// byte permutations, 32 for its 64 numbers, and stored in both orders.
//
// A warp has 16 rows and 128 columns, in one row after the other pieces of 16 bytes side by side.
// So its reads of a matrix and its writes of codes are of whole lines of 128 bytes. Codes of the
// transpose go through 2 KiB of shared memory, from where they are written in pieces of 16 rows,
// those of warps that lie below one another side by side.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/narrow.cuh"
#include "device/special.cuh"
#include "kvblock/cast.h"

namespace kvblock {

// Of a warp.
constexpr int kCastRows = 16, kCastColumns = 128;

// A patch has the numbers of a piece in each of its rows; so many are side by side.
template <typename T>
constexpr int kPatchColumns = 16 / static_cast<int>(sizeof(T));
template <typename T>
constexpr int kPatchRows = 64 / kPatchColumns<T>;
template <typename T>
constexpr int kPatchesWide = kCastColumns / kPatchColumns<T>;

// Where the patch of this lane begins in what its warp has.
template <typename T>
__device__ __forceinline__ int PatchRow() {
  return threadIdx.x % 32 / kPatchesWide<T> * kPatchRows<T>;
}
template <typename T>
__device__ __forceinline__ int PatchColumn() {
  return threadIdx.x % kPatchesWide<T> * kPatchColumns<T>;
}

template <typename T>
__device__ __forceinline__ uint4 LoadPiece(const T* x) {
  return *reinterpret_cast<const uint4*>(x);
}

template <typename T>
__device__ __forceinline__ void Widen(uint4 piece, float (&numbers)[kPatchColumns<T>]) {
  union {
    uint4 piece;
    T numbers[kPatchColumns<T>];
  } run;
  run.piece = piece;
#pragma unroll
  for (int i = 0; i < kPatchColumns<T>; ++i) numbers[i] = static_cast<float>(run.numbers[i]);
}

// Numbers rounded to nearest even, as they are stored.
template <typename T>
__device__ __forceinline__ uint4 RoundPiece(const float (&numbers)[kPatchColumns<T>]) {
  union {
    uint4 piece;
    T numbers[kPatchColumns<T>];
    __nv_bfloat162 pairs[4];
    __half2 half_pairs[4];
  } run;
#pragma unroll
  for (int i = 0; i < kPatchColumns<T>; i += 2) {
    if constexpr (sizeof(T) == 4) {
      run.numbers[i] = numbers[i];
      run.numbers[i + 1] = numbers[i + 1];
    } else if constexpr (std::is_same_v<T, __half>) {
      run.half_pairs[i / 2] = __floats2half2_rn(numbers[i], numbers[i + 1]);
    } else {
      run.pairs[i / 2] = __floats2bfloat162_rn(numbers[i], numbers[i + 1]);
    }
  }
  return run.piece;
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

// A patch of a matrix in 8 bits: words of four codes of a row.
template <typename T>
struct CodePatch {
  uint32_t words[kPatchColumns<T> / 4][kPatchRows<T>];

  // The codes of row i.
  template <int kFormat>
  __device__ __forceinline__ void Round(int i, const float (&numbers)[kPatchColumns<T>]) {
#pragma unroll
    for (int w = 0; w < kPatchColumns<T> / 4; ++w)
      words[w][i] = FourCodes<kFormat>(numbers + 4 * w);
  }

  // To where the patch begins, in a matrix whose rows lie so far apart.
  __device__ __forceinline__ void Store(uint8_t* to, int stride) const {
#pragma unroll
    for (int i = 0; i < kPatchRows<T>; ++i) {
      uint8_t* const row = to + int64_t{i} * stride;
      if constexpr (sizeof(T) == 2) {
        *reinterpret_cast<uint2*>(row) = make_uint2(words[0][i], words[1][i]);
      } else {
        *reinterpret_cast<uint32_t*>(row) = words[0][i];
      }
    }
  }
  // Those of the transpose, to the codes of this warp in shared memory.
  __device__ __forceinline__ void StoreTransposed(uint4* codes, int turn) const;
};

// Where in the codes of a warp a column has those of its 16 rows. A patch's columns lie 64 or 128
// bytes apart and the codes of warps 2 KiB or more, so they change places with their neighbours:
// the lanes that write or read at once, eight or sixteen patches or columns of as many `turn`s,
// find theirs in different banks.
__device__ __forceinline__ int PlaceOfColumn(int column, int turn) {
  return column ^ column / 8 % 8 ^ turn;
}
// Of patches of 8 rows the lower one comes first in the right half of the columns.
template <typename T>
__device__ __forceinline__ bool LowerFirst(int column) {
  return sizeof(T) == 2 && column >= kCastColumns / 2;
}

template <typename T>
__device__ __forceinline__ void CodePatch<T>::StoreTransposed(uint4* codes, int turn) const {
#pragma unroll
  for (int w = 0; w < kPatchColumns<T> / 4; ++w) {
    uint32_t columns[kPatchRows<T> / 4][4];
#pragma unroll
    for (int i = 0; i < kPatchRows<T>; ++i) columns[i / 4][i % 4] = words[w][i];
#pragma unroll
    for (int i = 0; i < kPatchRows<T> / 4; ++i) TransposeBytes(columns[i]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = PatchColumn<T>() + 4 * w + j;
      uint4* const to = codes + PlaceOfColumn(column, turn);
      if constexpr (sizeof(T) == 2) {
        const bool second = (PatchRow<T>() != 0) != LowerFirst<T>(column);
        reinterpret_cast<uint2*>(to)[second] = make_uint2(columns[0][j], columns[1][j]);
      } else {
        *to = make_uint4(columns[0][j], columns[1][j], columns[2][j], columns[3][j]);
      }
    }
  }
}

// The codes of a column's 16 rows, which the lanes of a warp have stored.
template <typename T>
__device__ __forceinline__ uint4 LoadTransposed(const uint4* codes, int column, int turn) {
  const uint4 rows = codes[PlaceOfColumn(column, turn)];
  return LowerFirst<T>(column) ? make_uint4(rows.z, rows.w, rows.x, rows.y) : rows;
}

// The largest number of all threads of a CTA, in its first thread; `of_warps` is in shared memory.
template <int kWarps>
__device__ __forceinline__ float LargestOfCta(float largest, float (&of_warps)[kWarps]) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    largest = MaxOrNan(largest, __shfl_xor_sync(0xffffffff, largest, step));
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 1; i < kWarps; ++i) largest = MaxOrNan(largest, of_warps[i]);
  }
  return largest;
}

}  // namespace kvblock
