// y = x w for few rows of x: x and y in bfloat16, w in 4 bits with a scale for each 128 rows of a
// column. Reading w is all the time there should be, so w lies as the tensor cores want it.
//
//   x [M, K], M <= 16; y [M, N]; scales [K / 128, N]; w [K / 32, N / 32, lane 32, tile 4] words.
//
// A word has 8 numbers of one column: rows 32 b + 8 (lane % 4) + 0 ... 7 of column
// 32 c + 8 tile + lane / 4. A product sums over rows, in whatever order: so a lane takes 8
// neighbours of x by one load of 16 bytes, and what it has of w goes with them. The tensor cores
// have 16 columns of w times 8 rows of x.
//
// A number n is multiplied as 128 + n, which is n behind the bits of 128 in bfloat16: two numbers
// take an instruction, and often a shift. So 136 times the sum of x is subtracted from a group's
// products, (128 + n) - 136 = n - 8; ones as columns of w give that sum.
//
// A CTA has 32 kBands columns and 16 warps. Warp i takes groups of 128 rows i, i + 16, ..., half a
// group at a time. Each warp has stages of its own in shared memory: while it computes, the next
// halves are on their way, x, w and scales. At the end the warps' sums meet in shared memory.
#include <cuda_bf16.h>

constexpr int kWarps = 16, kGroup = 128, kHalf = kGroup / 2, kSteps = kHalf / 32;
constexpr int kStages = 3;

#ifndef KVBLOCK_EMULATOR
#include "instructions.cuh"

// a & b | c, which the compiler would make two instructions of.
__device__ __forceinline__ unsigned AndOr(unsigned a, unsigned b, unsigned c) {
  unsigned result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

extern __shared__ uint4 shared[];
#endif

// 128 + numbers 2 i and 2 i + 1 of a word, in bfloat16.
__device__ __forceinline__ unsigned PairOf(unsigned word, int i) {
  return AndOr(word >> 4 * i, 0x000f000fu, 0x43004300u);
}

// What a warp has of half a group: x's rows, those of w that go with them; of the second half also
// the group's scales.
template <int kBands, int kEights>
struct Stage {
  uint4 x[8 * kEights * kHalf / 8];
  uint4 w[kSteps][kBands][32];
  float scales[kBands * 32];
};
// Where 8 neighbours of a row of x lie: two rows that are read together have different banks.
__device__ __forceinline__ int PlaceOf(int row, int eighth) {
  return row * (kHalf / 8) + (eighth ^ row % 2 * 4);
}

// kEights: so many times 8 rows of x.
template <int kBands, int kEights>
__global__ void __launch_bounds__(kWarps * 32, 1)
    w4a16(const __nv_bfloat16* __restrict__ x, const uint4* __restrict__ w,
          const float* __restrict__ scales, __nv_bfloat16* __restrict__ y, int m, int k, int n) {
  using AStage = Stage<kBands, kEights>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  const int groups = k / kGroup, first = blockIdx.x * kBands;
  AStage* const stages = reinterpret_cast<AStage*>(shared) + warp * kStages;
  const auto after = [&](AStage* at) { return at == stages + kStages - 1 ? stages : at + 1; };
  // Where the next half to load begins, for this lane.
  const long long block = n;  // 32 rows of w, in pieces of 16 bytes
  const uint4* w_from = w + warp * 4 * block + first * 32 + lane;
  const __nv_bfloat16* x_from =
      x + lane / 8 * static_cast<long long>(k) + warp * kGroup + lane % 8 * 8;
  const float* scales_from = scales + static_cast<long long>(warp) * n + first * 32 + lane * 4;
  const int x_to = PlaceOf(lane / 8, lane % 8);
  int group_to_load = warp;
  // Half a group; also where there is none, so that the last ones are waited for.
  AStage* to = stages;
  auto load = [&](int half) {
    if (group_to_load < groups) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
          Copy16(&to->w[step][band][lane], w_from + step * block + band * 32);
        }
      }
      // Nobody looks at what rows from m on give.
#pragma unroll
      for (int i = 0; i < kEights * 2; ++i) {
        if (lane / 8 + i * 4 >= m) continue;
        Copy16(&to->x[x_to + i * 4 * (kHalf / 8)], x_from + i * 4 * static_cast<long long>(k));
      }
      if (half == 1 && lane < kBands * 8) Copy16(&to->scales[lane * 4], scales_from);
    }
    EndCopies();
    if (half == 0) {
      w_from += kSteps * block;
      x_from += kHalf;
    } else {
      w_from += (kWarps * 4 - kSteps) * block;
      x_from += kWarps * kGroup - kHalf;
      scales_from += static_cast<long long>(kWarps) * n;
      group_to_load += kWarps;
    }
    to = after(to);
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) load(i % 2);

  constexpr int kTiles = kBands * 2;  // of 16 columns
  float total[kTiles][kEights][4] = {};
  AStage* here = stages;
  for (int group = warp; group < groups; group += kWarps) {
    float sum[kTiles][kEights][4] = {}, of_x[kEights][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      WaitForCopies<kStages - 2>();
      __syncwarp();  // for all lanes; and all are done with the half before
      load((half + kStages - 1) % 2);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint4 rows[kEights];
#pragma unroll
        for (int i = 0; i < kEights; ++i) {
          rows[i] = here->x[PlaceOf(row + i * 8, step * 4 + quad)];
          const unsigned ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
          Mma(of_x[i], ones, rows[i].x, rows[i].y);
          Mma(of_x[i], ones, rows[i].z, rows[i].w);
        }
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
          const uint4 words = here->w[step][band][lane];
          const unsigned of_tile[2][2] = {{words.x, words.y}, {words.z, words.w}};
#pragma unroll
          for (int pair = 0; pair < 4; pair += 2) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
              const unsigned (&word)[2] = of_tile[tile];
              const unsigned a[4] = {PairOf(word[0], pair), PairOf(word[1], pair),
                                     PairOf(word[0], pair + 1), PairOf(word[1], pair + 1)};
#pragma unroll
              for (int i = 0; i < kEights; ++i) {
                Mma(sum[band * 2 + tile][i], a, pair == 0 ? rows[i].x : rows[i].z,
                    pair == 0 ? rows[i].y : rows[i].w);
              }
            }
          }
        }
      }
      if (half == 1) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const float scale[2] = {here->scales[tile * 16 + row], here->scales[tile * 16 + row + 8]};
#pragma unroll
          for (int i = 0; i < kEights; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              total[tile][i][j] += scale[j / 2] * (sum[tile][i][j] - 136 * of_x[i][j]);
            }
          }
        }
      }
      here = after(here);
    }
  }

  __syncthreads();  // all are done with their stages
  constexpr int kRows = kEights * 8, kPitch = kBands * 32 + 4;
  float* const sums = reinterpret_cast<float*>(shared);  // [warp, row, column]
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int of_row = i * 8 + quad * 2 + j % 2, column = tile * 16 + row + j / 2 * 8;
        sums[(warp * kRows + of_row) * kPitch + column] = total[tile][i][j];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < m * kBands * 32; i += kWarps * 32) {
    const int of_row = i / (kBands * 32), column = i % (kBands * 32);
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < kWarps; ++part) {
      sum += sums[(part * kRows + of_row) * kPitch + column];
    }
    y[static_cast<long long>(of_row) * n + first * 32 + column] = __nv_bfloat16(sum);
  }
}
