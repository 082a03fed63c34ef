// Squares of 8 by 8 numbers, each in one thread's registers: loaded, rounded to 8 bits, transposed
// by byte permutations, 32 for its 64 numbers, and stored in both orders.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/narrow.cuh"
#include "device/special.cuh"
#include "kvblock/cast.h"

namespace kvblock {

constexpr int kCastThreads = 256, kCastWarps = kCastThreads / 32;
constexpr int kCastSquare = 8;

// Eight numbers that lie side by side, as they are stored.
template <typename T>
struct Eight {
  uint4 bits[sizeof(T) / 2];
};

template <typename T>
__device__ __forceinline__ Eight<T> LoadEight(const T* x) {
  Eight<T> eight;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) {
    eight.bits[i] = reinterpret_cast<const uint4*>(x)[i];
  }
  return eight;
}

template <typename T>
__device__ __forceinline__ void StoreEight(T* to, const Eight<T>& eight) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) {
    __stwb(reinterpret_cast<uint4*>(to) + i, eight.bits[i]);  // in one piece
  }
}

template <typename T>
__device__ __forceinline__ void Widen(const Eight<T>& eight, float (&numbers)[kCastSquare]) {
  union {
    Eight<T> bits;
    T numbers[kCastSquare];
  } run;
  run.bits = eight;
#pragma unroll
  for (int i = 0; i < kCastSquare; ++i) numbers[i] = static_cast<float>(run.numbers[i]);
}

// Numbers rounded to nearest even, as they are stored.
template <typename T>
__device__ __forceinline__ Eight<T> RoundEight(const float (&numbers)[kCastSquare]) {
  union {
    Eight<T> bits;
    T numbers[kCastSquare];
    __nv_bfloat162 pairs[kCastSquare / 2];
    __half2 half_pairs[kCastSquare / 2];
  } run;
#pragma unroll
  for (int i = 0; i < kCastSquare; i += 2) {
    if constexpr (sizeof(T) == 4) {
      run.numbers[i] = numbers[i];
      run.numbers[i + 1] = numbers[i + 1];
    } else if constexpr (std::is_same_v<T, __half>) {
      run.half_pairs[i / 2] = __floats2half2_rn(numbers[i], numbers[i + 1]);
    } else {
      run.pairs[i / 2] = __floats2bfloat162_rn(numbers[i], numbers[i + 1]);
    }
  }
  return run.bits;
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

// A square of a matrix in 8 bits: of each row the left four codes and the right four.
struct CodeSquare {
  uint32_t halves[2][kCastSquare];

  // The codes of row i.
  template <int kFormat>
  __device__ __forceinline__ void Round(int i, const float (&numbers)[kCastSquare]) {
    halves[0][i] = FourCodes<kFormat>(numbers);
    halves[1][i] = FourCodes<kFormat>(numbers + 4);
  }

  // To where the square begins, in a matrix whose rows lie so far apart.
  __device__ __forceinline__ void Store(uint8_t* to, int stride) const {
#pragma unroll
    for (int i = 0; i < kCastSquare; ++i) {
      *reinterpret_cast<uint2*>(to + int64_t{i} * stride) = make_uint2(halves[0][i], halves[1][i]);
    }
  }
  // The same of its transpose.
  __device__ __forceinline__ void StoreTransposed(uint8_t* to, int stride) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t upper[4], lower[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        upper[i] = halves[half][i];
        lower[i] = halves[half][4 + i];
      }
      TransposeBytes(upper);
      TransposeBytes(lower);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        *reinterpret_cast<uint2*>(to + int64_t{4 * half + j} * stride) =
            make_uint2(upper[j], lower[j]);
      }
    }
  }
};

// Two squares that lie side by side, to where the left one begins.
__device__ __forceinline__ void StorePair(const CodeSquare (&squares)[2], uint8_t* to, int stride) {
  const auto& left = squares[0].halves;
  const auto& right = squares[1].halves;
#pragma unroll
  for (int i = 0; i < kCastSquare; ++i) {
    *reinterpret_cast<uint4*>(to + int64_t{i} * stride) =
        make_uint4(left[0][i], left[1][i], right[0][i], right[1][i]);
  }
}

// The largest number of all threads of a CTA, in its first thread; `of_warps` is in shared memory.
__device__ __forceinline__ float LargestOfCta(float largest, float (&of_warps)[kCastWarps]) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    largest = MaxOrNan(largest, __shfl_xor_sync(0xffffffff, largest, step));
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 1; i < kCastWarps; ++i) largest = MaxOrNan(largest, of_warps[i]);
  }
  return largest;
}

}  // namespace kvblock
