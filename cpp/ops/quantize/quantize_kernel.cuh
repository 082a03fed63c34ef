// Quantization as CUDA kernels: rows of 16 bits become e4m3 and scales (kvblock/quantize.h).
//
// QuantizeTiles does it. A CTA has a tile, 128 rows of one head, and a warp 16 of them, all in
// registers, laid out as operands of mma (device/mma.cuh): lane l has of rows l / 4 and l / 4 + 8
// every fourth run of kWide neighbours. It loads runs and stores their codes, with no exchange:
//
//   columns of group G   4 kWide G + kWide (l % 4) + 0 .. kWide - 1
//
// M is a Hadamard matrix, so few products make it. Sixteen columns (l % 4, and 4 neighbours) go
// through the tensor cores, whose other operand is only signs. The other digits of a column's
// number, within a run and that of the group, are numbers of registers: sums and differences. A
// number of groups that is no power of 2 gets R. Products are exact; sums are float32.
//
// What has to be known before (the mean, the largest of a head) comes of launches in front, in
// parts that lie in the workspace: sums of what is read as it is (QuantizeParts), or the largest of
// tiles that are computed and not written. Every CTA that needs them adds up all parts in order, so
// all get the same bits. The mean of turned rows is the turned mean, M being linear: so a part's
// sum is turned once.
//
// The launch that writes goes backwards: what the launch in front read last is still in L2.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/mma.cuh"
#include "device/narrow.cuh"
#include "device/special.cuh"
#include "kvblock/quantize.h"

namespace kvblock {

constexpr int kQuantizeThreads = 256, kQuantizeWarps = kQuantizeThreads / 32;
static_assert(kQuantizeWarps * 16 == KVBLOCK_QUANTIZE_ROWS);

struct QuantizeArray {
  const char* x;
  char* out;
  float *scales, *mean;
  const int32_t* lens;
  float *sums, *turned;  // of each part, as it is and turned; the workspace's
  float* largest;        // of each part
  int64_t batch_stride, row_stride, head_stride;
  int64_t out_batch_stride, out_row_stride, out_head_stride;
  int32_t rows, heads, dim;
  int32_t blocks, parts, part_blocks;
  int32_t shared;
  int32_t end;  // its CTAs end here, and begin where those of the array before end
  bool turns;
};

struct QuantizeParams {
  QuantizeArray arrays[KVBLOCK_QUANTIZE_MAX_ARRAYS];
};

// What a CTA has: a head of an array's batch member, and a block or a part of its rows.
struct QuantizePlace {
  int array, batch, head, piece;
  int64_t pair;  // the number of batch and head
};

__device__ __forceinline__ QuantizePlace PlaceOf(const QuantizeParams& p, int number, bool parts) {
  QuantizePlace at{};
  int begin = 0;
  while (number >= p.arrays[at.array].end) begin = p.arrays[at.array++].end;
  const QuantizeArray& a = p.arrays[at.array];
  // Heads run fastest: those of a row lie side by side.
  const unsigned from = static_cast<unsigned>(number - begin), heads = a.heads;
  const unsigned pieces = parts ? a.parts : a.blocks, rest = from / heads;
  at.head = static_cast<int>(from % heads);
  at.piece = static_cast<int>(rest % pieces);
  at.batch = static_cast<int>(rest / pieces);
  at.pair = int64_t{at.batch} * a.heads + at.head;
  return at;
}

// How many rows of a batch member count.
__device__ __forceinline__ int RowsThatCount(const QuantizeArray& a, int batch) {
  return a.lens == nullptr ? a.rows : max(0, min(a.rows, a.lens[batch]));
}

// The digits that make M: whether a column's sign is minus.
__device__ __forceinline__ uint32_t QuantizeSigns(int word) {
  return word == 0 ? 0x243f6a88u : word == 1 ? 0x85a308d3u : word == 2 ? 0x13198a2eu : 0x03707344u;
}

// cas(2 pi k / r) / sqrt(r), for k from 0 to r - 1.
__device__ __forceinline__ float QuantizeR(int r, int k) {
  constexpr float three[] = {0.577350269f, 0.211324865f, -0.788675135f};
  constexpr float five[] = {0.447213595f, 0.563521994f, -0.0989378398f, -0.624668953f,
                            -0.287128797f};
  constexpr float seven[] = {0.377964473f,  0.531161529f,  0.284383118f,  -0.176541575f,
                             -0.504526854f, -0.452593125f, -0.0598475287f};
  return r == 3 ? three[k] : r == 5 ? five[k] : r == 7 ? seven[k] : 1.0f;
}

__device__ __forceinline__ float MaxOfWarp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    x = MaxOrNan(x, __shfl_xor_sync(0xffffffff, x, step));
  }
  return x;
}

// The largest of what all threads have, in all of them.
__device__ __forceinline__ float MaxOfCta(float x, float* of_warps) {
  x = MaxOfWarp(x);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = of_warps[0];
#pragma unroll
  for (int warp = 1; warp < kQuantizeWarps; ++warp) x = MaxOrNan(x, of_warps[warp]);
  return x;
}

// ---- in front: sums and largest sizes of rows as they are --------------------------------------

// A row of M times the numbers of threads 0 to dim - 1, without 1 / sqrt(p). For all threads.
__device__ __forceinline__ float TurnOverThreads(float x, int dim,
                                                 float (*shown)[KVBLOCK_QUANTIZE_MAX_DIM]) {
  const int column = static_cast<int>(threadIdx.x), p = dim & -dim, r = dim / p;
  const bool there = column < dim;
  if (there && (QuantizeSigns(column / 32) >> column % 32 & 1) != 0) x = -x;
  int place = 0;  // two in turns, so that one meeting is enough
  for (int bit = 1; bit < p; bit *= 2, place ^= 1) {
    if (there) shown[place][column] = x;
    __syncthreads();
    if (!there) continue;
    const float other = shown[place][column ^ bit];
    x = (column & bit) != 0 ? other - x : x + other;
  }
  if (r == 1) return x;
  if (there) shown[place][column] = x;
  __syncthreads();
  if (!there) return x;
  float sum = 0.0f;
  for (int j = 0; j < r; ++j) {
    sum = fmaf(QuantizeR(r, column / p * j % r), shown[place][j * p + column % p], sum);
  }
  return sum;
}

template <typename T>
__global__ void __launch_bounds__(kQuantizeThreads)
    QuantizeParts(const __grid_constant__ QuantizeParams p) {
  constexpr int kWide = 8, kAhead = 8;  // loads of a thread that are under way together
  __shared__ float gathered[kQuantizeThreads * kWide];
  __shared__ float shown[2][KVBLOCK_QUANTIZE_MAX_DIM];
  const QuantizePlace at = PlaceOf(p, static_cast<int>(blockIdx.x), true);
  const QuantizeArray& a = p.arrays[at.array];
  const int thread = static_cast<int>(threadIdx.x);
  const int units = a.dim / kWide, together = kQuantizeThreads / units;
  const int unit = thread % units, first = thread / units;
  const int length = a.part_blocks * KVBLOCK_QUANTIZE_ROWS, begin = at.piece * length;
  const int end = min(begin + length, RowsThatCount(a, at.batch));
  const char* const from = a.x + at.batch * a.batch_stride + at.head * a.head_stride + unit * 16;
  const bool sums = a.sums != nullptr;

  float kept[kWide] = {};
  int row = first < together ? begin + first : end;  // the rest of the threads has none
  for (; row < end; row += kAhead * together) {
    uint4 x[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int here = row + i * together;
      x[i] = uint4{0, 0, 0, 0};
      if (here < end) x[i] = __ldg(reinterpret_cast<const uint4*>(from + here * a.row_stride));
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const uint32_t words[] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
      for (int w = 0; w < kWide / 2; ++w) {
        const float2 two = Unpack<T>(words[w]);
        if (sums) {
          kept[2 * w] += two.x;
          kept[2 * w + 1] += two.y;
        } else {
          kept[2 * w] = MaxOrNan(kept[2 * w], fabsf(two.x));
          kept[2 * w + 1] = MaxOrNan(kept[2 * w + 1], fabsf(two.y));
        }
      }
    }
  }

  const int64_t part = at.pair * a.parts + at.piece;
  if (!sums) {
    float largest = kept[0];
#pragma unroll
    for (int i = 1; i < kWide; ++i) largest = MaxOrNan(largest, kept[i]);
    largest = MaxOfCta(largest, gathered);
    if (thread == 0) a.largest[part] = largest;
    return;
  }
  if (first < together) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) gathered[first * a.dim + unit * kWide + i] = kept[i];
  }
  __syncthreads();
  float sum = 0.0f;
  if (thread < a.dim) {
    for (int i = 0; i < together; ++i) sum += gathered[i * a.dim + thread];
    a.sums[part * a.dim + thread] = sum;
  }
  if (!a.turns) return;
  sum = TurnOverThreads(sum, a.dim, shown);
  if (thread < a.dim) a.turned[part * a.dim + thread] = sum;
}

// ---- tiles -------------------------------------------------------------------------------------

// How a lane has 16 rows: kGroups runs of kWide neighbours of each of two.
template <typename T, int kDim>
struct QuantizeTile {
  static constexpr int kWide = kDim % 32 == 0 ? 8 : 4, kWords = kWide / 2;
  static constexpr int kGroups = kDim / (4 * kWide);
  static constexpr int kPower = kDim & -kDim, kRest = kDim / kPower;
  // 1 / sqrt(kPower)
  static constexpr float kFactor = kPower == 16   ? 0.25f
                                   : kPower == 32 ? 0.17677669529663687f
                                   : kPower == 64 ? 0.125f
                                                  : 0.08838834764831845f;
  static_assert(kDim % 16 == 0 && kDim <= KVBLOCK_QUANTIZE_MAX_DIM);

  using Words = uint32_t[2][kGroups][kWords];
  using Numbers = float[2][kGroups][kWide];

  // Rows from `count` on are zeros.
  __device__ static __forceinline__ void Load(const char* from, int64_t row_stride, int count,
                                              Words& x) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane / 4 + 8 * r;
      const char* const runs = from + row * row_stride + lane % 4 * (kWide * 2);
      const bool there = row < count;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const char* const run = runs + g * (kWide * 8);
        if constexpr (kWide == 8) {
          uint4 loaded = uint4{0, 0, 0, 0};
          if (there) loaded = __ldg(reinterpret_cast<const uint4*>(run));
          x[r][g][0] = loaded.x;
          x[r][g][1] = loaded.y;
          x[r][g][2] = loaded.z;
          x[r][g][3] = loaded.w;
        } else {
          uint2 loaded = uint2{0, 0};
          if (there) loaded = __ldg(reinterpret_cast<const uint2*>(run));
          x[r][g][0] = loaded.x;
          x[r][g][1] = loaded.y;
        }
      }
    }
  }

  __device__ static __forceinline__ void Widen(const Words& x, Numbers& y) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          const float2 two = Unpack<T>(x[r][g][w]);
          y[r][g][2 * w] = two.x;
          y[r][g][2 * w + 1] = two.y;
        }
      }
    }
  }

  // x M sqrt(kPower).
  __device__ static __forceinline__ void Turn(const Words& x, Numbers& y) {
    const int lane = static_cast<int>(threadIdx.x) % 32, t = lane % 4, column = lane / 4;
    // What a lane has of the tensor cores' other operand: of rows (t, h, l), of column (column / 2,
    // p, column % 2), 1 with the sign s (-1)^(t . (column / 2) + h p + l (column % 2)).
    const uint32_t one = Pack<T>(1.0f, 1.0f), minus = 0x80008000u;
    const int both = t & column / 2;
    uint32_t ones = one;
    if (((both ^ both >> 1) & 1) != 0) ones ^= minus;
    if ((column & 1) != 0) ones ^= 0x80000000u;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int begin = 4 * kWide * g;  // of the group's columns, of which 32 or 16 are in a word
      const uint32_t signs = QuantizeSigns(begin / 32) >> (begin % 32 + kWide * t);
#pragma unroll
      for (int u = 0; u < kWide / 4; ++u) {
        uint32_t b[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t two = signs >> (4 * u + 2 * h);
          b[h] = ones ^ ((two & 1) << 15 | (two & 2) << 30);
        }
        const uint32_t rows[4] = {x[0][g][2 * u], x[1][g][2 * u], x[0][g][2 * u + 1],
                                  x[1][g][2 * u + 1]};
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          float c[4] = {};
          Mma16x8x16<T>(c, rows, b[0], p == 0 ? b[1] : b[1] ^ minus);
#pragma unroll
          for (int i = 0; i < 4; ++i) y[i / 2][g][4 * u + 2 * p + i % 2] = c[i];
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (kWide == 8) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
#pragma unroll
          for (int i = 0; i < 4; ++i) AddAndSubtract(y[r][g][i], y[r][g][i + 4]);
        }
      }
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        if constexpr (kRest == 1) {
#pragma unroll
          for (int bit = 1; bit < kGroups; bit *= 2) {
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
              if ((g & bit) == 0) AddAndSubtract(y[r][g][i], y[r][g | bit][i]);
            }
          }
        } else {
          static_assert(kGroups == kRest || kRest == 1);
          float made[kGroups];
#pragma unroll
          for (int g = 0; g < kGroups; ++g) {
            made[g] = 0.0f;
#pragma unroll
            for (int j = 0; j < kGroups; ++j) {
              made[g] = fmaf(QuantizeR(kRest, g * j % kRest), y[r][j][i], made[g]);
            }
          }
#pragma unroll
          for (int g = 0; g < kGroups; ++g) y[r][g][i] = made[g];
        }
      }
    }
  }

  __device__ static __forceinline__ void AddAndSubtract(float& a, float& b) {
    const float sum = a + b;
    b = a - b;
    a = sum;
  }

  // The mean, of all columns in shared memory; rows from `count` on stay zeros.
  __device__ static __forceinline__ void Centre(const float* mean, int count, Numbers& y) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const float* const of = mean + g * (4 * kWide) + lane % 4 * kWide;
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        const float centre = of[i];
#pragma unroll
        for (int r = 0; r < 2; ++r) y[r][g][i] -= centre;
      }
    }
    if (count >= 16) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (lane / 4 + 8 * r < count) continue;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int i = 0; i < kWide; ++i) y[r][g][i] = 0.0f;
      }
    }
  }

  __device__ static __forceinline__ float Largest(const Numbers& y) {
    float largest[4] = {};  // four that do not wait for each other
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int i = 0; i < kWide; ++i) {
          largest[i % 4] = MaxOrNan(largest[i % 4], fabsf(y[r][g][i]));
        }
      }
    }
    return MaxOrNan(MaxOrNan(largest[0], largest[1]), MaxOrNan(largest[2], largest[3]));
  }

  // The codes of the first `count` rows, `code` making two of two numbers.
  template <typename Code>
  __device__ static __forceinline__ void Store(char* to, int64_t row_stride, int count,
                                               const Numbers& y, Code code) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane / 4 + 8 * r;
      char* const runs = to + row * row_stride + lane % 4 * kWide;
      const bool there = row < count;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        unsigned words[kWide / 4];
#pragma unroll
        for (int w = 0; w < kWide / 4; ++w) {
          const unsigned low = code(y[r][g][4 * w], y[r][g][4 * w + 1]);
          words[w] = low | unsigned{code(y[r][g][4 * w + 2], y[r][g][4 * w + 3])} << 16;
        }
        if (!there) continue;
        if constexpr (kWide == 8) {
          *reinterpret_cast<uint2*>(runs + g * (kWide * 4)) = uint2{words[0], words[1]};
        } else {
          *reinterpret_cast<unsigned*>(runs + g * (kWide * 4)) = words[0];
        }
      }
    }
  }
};

// x / scale, rounded as a division is, in three instructions: a quotient by the reciprocal is off
// by an ulp or two, and what is missing of x is exact.
struct QuantizeDivision {
  float reciprocal, scale;

  // A scale is at least 2^-126 and below 2^120, or inf or NaN.
  __device__ __forceinline__ explicit QuantizeDivision(float of)
      : reciprocal(1.0f / of), scale(of > 3.402823466e38f ? 0.0f : of) {}
  __device__ __forceinline__ float operator()(float x) const {
    const float quotient = x * reciprocal;
    // In this order -0 stays: of 0 - 0 the sign would be lost.
    const float beyond = fmaf(quotient, scale, -x);
    return fmaf(-beyond, reciprocal, quotient);
  }
};

// The mean of a head's rows, from the sums of the parts; all columns, for the first threads.
__device__ __forceinline__ float MeanOfParts(const QuantizeArray& a, const float* sums,
                                             int64_t pair, int count) {
  const int parts = a.parts, dim = a.dim;
  const float* const from = sums + pair * parts * dim + threadIdx.x;
  float total = 0.0f;
#pragma unroll 8
  for (int i = 0; i < parts; ++i) total += from[int64_t{i} * dim];
  return total / static_cast<float>(max(count, 1));
}

// The scale of a head, or of all heads of a batch member, from the largest of the parts.
__device__ __forceinline__ float LargestOfParts(const QuantizeArray& a, const QuantizePlace& at) {
  const bool tensor = a.shared == KVBLOCK_QUANTIZE_TENSOR;
  const int64_t first = tensor ? at.pair - at.head : at.pair;
  const int count = (tensor ? a.heads : 1) * a.parts;
  float largest = 0.0f;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < count; i += 32) {
    largest = MaxOrNan(largest, a.largest[first * a.parts + i]);
  }
  return MaxOfWarp(largest);
}

__device__ __forceinline__ float ScaleOf(float largest) {
  return largest == 0.0f ? 1.0f : MaxOrNan(largest * (1.0f / 448.0f), 0x1p-126f);
}

// kWrites: a tile each. Else the largest of a part, tile after tile.
template <typename T, int kDim, bool kWrites>
__global__ void __launch_bounds__(kQuantizeThreads, 2)
    QuantizeTiles(const __grid_constant__ QuantizeParams p) {
  using Tile = QuantizeTile<T, kDim>;
  __shared__ float mean[KVBLOCK_QUANTIZE_MAX_DIM];
  __shared__ float of_warps[kQuantizeWarps];
  const int number = static_cast<int>(kWrites ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  const QuantizePlace at = PlaceOf(p, number, !kWrites);
  const QuantizeArray& a = p.arrays[at.array];
  const int counting = RowsThatCount(a, at.batch), warp = static_cast<int>(threadIdx.x) / 32;
  int block = kWrites ? at.piece : at.piece * a.part_blocks;
  const int end = kWrites ? block + 1 : min(block + a.part_blocks, a.blocks);
  float largest = 0.0f;

  typename Tile::Words x;
  typename Tile::Numbers y;
  for (bool first = true; block < end; ++block, first = false) {
    const int row = block * KVBLOCK_QUANTIZE_ROWS + warp * 16;
    const char* const from =
        a.x + at.batch * a.batch_stride + row * a.row_stride + at.head * a.head_stride;
    Tile::Load(from, a.row_stride, counting - row, x);
    if (first && a.mean != nullptr) {
      if (threadIdx.x < kDim) {
        mean[threadIdx.x] = MeanOfParts(a, a.turns ? a.turned : a.sums, at.pair, counting);
        if (kWrites && block == 0) {
          a.mean[at.pair * kDim + threadIdx.x] = MeanOfParts(a, a.sums, at.pair, counting);
        }
      }
      __syncthreads();
    }
    if (a.turns) {
      Tile::Turn(x, y);
    } else {
      Tile::Widen(x, y);
    }
    if (a.mean != nullptr) Tile::Centre(mean, counting - row, y);
    if (!kWrites || a.shared == KVBLOCK_QUANTIZE_BLOCK) {
      largest = MaxOrNan(largest, Tile::Largest(y));
    }
  }

  const float factor = a.turns ? Tile::kFactor : 1.0f;
  if constexpr (!kWrites) {
    largest = MaxOfCta(largest, of_warps) * factor;
    if (threadIdx.x == 0) a.largest[at.pair * a.parts + at.piece] = largest;
  } else {
    const bool of_block = a.shared == KVBLOCK_QUANTIZE_BLOCK;
    largest = of_block ? MaxOfCta(largest, of_warps) * factor : LargestOfParts(a, at);
    const float scale = ScaleOf(largest);
    if (threadIdx.x == 0 && (of_block || at.piece == 0)) {
      a.scales[of_block ? at.pair * a.blocks + at.piece : at.pair] = scale;
    }
    const int row = at.piece * KVBLOCK_QUANTIZE_ROWS + warp * 16;
    char* const to = a.out + at.batch * a.out_batch_stride + row * a.out_row_stride +
                     at.head * a.out_head_stride;
    if (a.turns) {
      const float times = factor / scale;
      Tile::Store(to, a.out_row_stride, a.rows - row, y,
                  [=](float one, float two) { return PairToE4m3(one * times, two * times); });
    } else {
      // Below, what is missing of x might be less than the smallest number.
      const bool small = scale < 0x1p-60f;
      if (small) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int g = 0; g < Tile::kGroups; ++g) {
#pragma unroll
            for (int i = 0; i < Tile::kWide; ++i) y[r][g][i] *= 0x1p64f;
          }
        }
      }
      const QuantizeDivision divide(small ? scale * 0x1p64f : scale);
      Tile::Store(to, a.out_row_stride, a.rows - row, y,
                  [=](float one, float two) { return PairToE4m3(divide(one), divide(two)); });
    }
  }
}

}  // namespace kvblock
