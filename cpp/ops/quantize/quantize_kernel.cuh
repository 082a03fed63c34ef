// Quantization as CUDA kernels: rows of 16 bits become e4m3 or int8, and scales
// (kvblock/quantize.h).
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

#include "device/fast_div.cuh"
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
  int64_t batch_stride, head_stride, out_batch_stride, out_head_stride;
  uint32_t row_stride, out_row_stride;
  int32_t rows, heads, dim;
  int32_t blocks, parts, part_blocks;
  int32_t shared;
  bool turns, integers;
  // Its CTAs, in this launch: they end here, and begin where those of the array before end.
  int32_t end;
  FastDiv of_heads, of_pieces;
};

struct QuantizeParams {
  QuantizeArray arrays[KVBLOCK_QUANTIZE_MAX_ARRAYS];
};

// What a CTA has: a head of an array's batch member, and a block or a part of its rows.
struct QuantizePlace {
  int array, batch, head, piece;
  int64_t pair;  // the number of batch and head
};

__device__ __forceinline__ QuantizePlace PlaceOf(const QuantizeParams& p, int number) {
  QuantizePlace at{};
  int begin = 0;
  while (number >= p.arrays[at.array].end) begin = p.arrays[at.array++].end;
  const QuantizeArray& a = p.arrays[at.array];
  // Heads run fastest: those of a row lie side by side.
  const uint32_t from = static_cast<uint32_t>(number - begin), rest = a.of_heads(from);
  at.head = static_cast<int>(from - rest * a.of_heads.d);
  at.batch = static_cast<int>(a.of_pieces(rest));
  at.piece = static_cast<int>(rest - at.batch * a.of_pieces.d);
  at.pair = int64_t{at.batch} * a.heads + at.head;
  return at;
}

// How many rows of a batch member count.
__device__ __forceinline__ int RowsThatCount(const QuantizeArray& a, int batch) {
  return a.lens == nullptr ? a.rows : max(0, min(a.rows, a.lens[batch]));
}

// The signs that M begins with, 32 columns to a word: digits of pi.
constexpr uint32_t kQuantizeSigns[] = {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344};

// The same as they are in pairs of numbers of 16 bits: a column's sign is that of its number.
struct QuantizeSignPairs {
  alignas(16) uint32_t pairs[KVBLOCK_QUANTIZE_MAX_DIM / 2];

  constexpr QuantizeSignPairs() : pairs() {
    for (int i = 0; i < KVBLOCK_QUANTIZE_MAX_DIM / 2; ++i) {
      const uint32_t two = kQuantizeSigns[i / 16] >> i % 16 * 2;
      pairs[i] = (two & 1) << 15 | (two & 2) << 30;
    }
  }
};
static __device__ const QuantizeSignPairs kSignPairs{};

// That of a column: 1 for minus.
__device__ __forceinline__ uint32_t QuantizeSign(int column) {
  return kSignPairs.pairs[column / 2] >> (15 + 16 * (column % 2)) & 1;
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
  if (there && QuantizeSign(column) != 0) x = -x;
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
  const QuantizePlace at = PlaceOf(p, static_cast<int>(blockIdx.x));
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
      if (here < end) {
        const uint64_t at_row = uint64_t{static_cast<uint32_t>(here)} * a.row_stride;
        x[i] = __ldg(reinterpret_cast<const uint4*>(from + at_row));
      }
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

  // From the lane's first run on. Rows from `count` on, counted from its first, are zeros.
  __device__ static __forceinline__ void Load(const char* from, uint32_t row_stride, int count,
                                              Words& x) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const char* const runs = from + uint64_t{row_stride} * (8 * r);
      const bool there = 8 * r < count;
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
    const uint32_t t = threadIdx.x % 4, column = threadIdx.x % 32 / 4;
    // What a lane has of the tensor cores' other operand: of rows (t, h, l), of column (column / 2,
    // p, column % 2), 1 with the sign s (-1)^(t . (column / 2) + h p + l (column % 2)).
    const uint32_t one = Pack<T>(1.0f, 1.0f), minus = 0x80008000u;
    const uint32_t both = t & column / 2;
    uint32_t ones = one;
    if (((both ^ both >> 1) & 1) != 0) ones ^= minus;
    if ((column & 1) != 0) ones ^= 0x80000000u;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      uint32_t signs[kWords];
      const uint32_t* const pairs = kSignPairs.pairs + (4 * g + t) * kWords;
      if constexpr (kWide == 8) {
        const uint4 loaded = *reinterpret_cast<const uint4*>(pairs);
        signs[0] = loaded.x;
        signs[1] = loaded.y;
        signs[2] = loaded.z;
        signs[3] = loaded.w;
      } else {
        const uint2 loaded = *reinterpret_cast<const uint2*>(pairs);
        signs[0] = loaded.x;
        signs[1] = loaded.y;
      }
#pragma unroll
      for (int u = 0; u < kWide / 4; ++u) {
        const uint32_t b[2] = {ones ^ signs[2 * u], ones ^ signs[2 * u + 1]};
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

  // The mean, of all columns in shared memory; rows from `count` on, as above, stay zeros.
  __device__ static __forceinline__ void Centre(const float* mean, int count, Numbers& y) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const float* const of = mean + g * (4 * kWide) + threadIdx.x % 4 * kWide;
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        const float centre = of[i];
#pragma unroll
        for (int r = 0; r < 2; ++r) y[r][g][i] -= centre;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (8 * r < count) continue;
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

  // The codes of the first `count` rows, as above; `code` makes two of two numbers.
  template <typename Code>
  __device__ static __forceinline__ void Store(char* to, uint32_t row_stride, int count,
                                               const Numbers& y, Code code) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      char* const runs = to + uint64_t{row_stride} * (8 * r);
      const bool there = 8 * r < count;
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

__device__ __forceinline__ float ScaleOf(float largest, bool integers) {
  const float inverse = integers ? 1.0f / 127.0f : 1.0f / 448.0f;
  return largest == 0.0f ? 1.0f : MaxOrNan(largest * inverse, 0x1p-126f);
}

// kWrites: a tile each. Else the largest of a part, tile after tile.
template <typename T, int kDim, bool kWrites>
__global__ void __launch_bounds__(kQuantizeThreads, 2)
    QuantizeTiles(const __grid_constant__ QuantizeParams p) {
  using Tile = QuantizeTile<T, kDim>;
  __shared__ float mean[KVBLOCK_QUANTIZE_MAX_DIM];
  __shared__ float of_warps[kQuantizeWarps];
  const int number = static_cast<int>(kWrites ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  const QuantizePlace at = PlaceOf(p, number);
  const QuantizeArray& a = p.arrays[at.array];
  const int counting = RowsThatCount(a, at.batch);
  // The lane's first run of its tile.
  const uint32_t lane_row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const char* const head = a.x + at.batch * a.batch_stride + at.head * a.head_stride;

  typename Tile::Words x;
  typename Tile::Numbers y;
  const auto row_of = [&](int block) {
    return static_cast<uint32_t>(block) * KVBLOCK_QUANTIZE_ROWS + lane_row;
  };
  const auto load = [&](int block) {
    const uint32_t row = row_of(block);
    const char* const from = head + uint64_t{row} * a.row_stride + t * (Tile::kWide * 2);
    Tile::Load(from, a.row_stride, counting - static_cast<int>(row), x);
  };
  const auto compute = [&](int block) {
    if (a.turns) {
      Tile::Turn(x, y);
    } else {
      Tile::Widen(x, y);
    }
    if (a.mean != nullptr) Tile::Centre(mean, counting - static_cast<int>(row_of(block)), y);
  };

  int block = kWrites ? at.piece : at.piece * a.part_blocks;
  load(block);
  if (a.mean != nullptr) {
    if (threadIdx.x < kDim) {
      mean[threadIdx.x] = MeanOfParts(a, a.turns ? a.turned : a.sums, at.pair, counting);
      if (kWrites && block == 0) {
        a.mean[at.pair * kDim + threadIdx.x] = MeanOfParts(a, a.sums, at.pair, counting);
      }
    }
    __syncthreads();
  }
  const float factor = a.turns ? Tile::kFactor : 1.0f;

  if constexpr (!kWrites) {
    const int end = min(block + a.part_blocks, a.blocks);
    float largest = 0.0f;
    while (true) {
      compute(block);
      largest = MaxOrNan(largest, Tile::Largest(y));
      if (++block == end) break;
      load(block);
    }
    largest = MaxOfCta(largest, of_warps) * factor;
    if (threadIdx.x == 0) a.largest[at.pair * a.parts + at.piece] = largest;
  } else {
    compute(block);
    const bool of_block = a.shared == KVBLOCK_QUANTIZE_BLOCK;
    const float largest =
        of_block ? MaxOfCta(Tile::Largest(y), of_warps) * factor : LargestOfParts(a, at);
    const float scale = ScaleOf(largest, a.integers);
    if (threadIdx.x == 0 && (of_block || block == 0)) {
      a.scales[of_block ? at.pair * a.blocks + block : at.pair] = scale;
    }
    const uint32_t row = row_of(block);
    const int count = a.rows - static_cast<int>(row);
    char* const to = a.out + at.batch * a.out_batch_stride + at.head * a.out_head_stride +
                     uint64_t{row} * a.out_row_stride + t * Tile::kWide;
    // `of`: a number over its scale.
    const auto store = [&](auto of) {
      if (a.integers) {
        Tile::Store(to, a.out_row_stride, count, y,
                    [=](float one, float two) { return PairToInt8(of(one), of(two)); });
      } else {
        Tile::Store(to, a.out_row_stride, count, y,
                    [=](float one, float two) { return PairToE4m3(of(one), of(two)); });
      }
    };
    if (a.turns || a.integers) {
      const float times = factor / scale;
      store([=](float x) { return x * times; });
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
      store(QuantizeDivision(small ? scale * 0x1p64f : scale));
    }
  }
}

}  // namespace kvblock
