// y = x w for few rows of x: x and y in bfloat16, w in 4 bits with a scale for each 128 rows of a
// column. Reading w is all the time there is, so w lies as the tensor cores want it.
//
//   x [M, K], M <= 16; y [M, N]; scales [K / 128, N]; w [K / 32, N / 32, lane 32, tile 4] words.
//
// A word has 8 numbers of one column: rows 32 b + 8 (lane % 4) + 0 ... 7 of column
// 32 c + 8 tile + lane / 4. A product sums over rows, in whatever order: so a lane takes 8
// neighbours of x by one load of 16 bytes, and what it has of w goes with them.
//
// A CTA has 32 kBands columns and 8 warps. Warp i takes groups of 128 rows i, i + 8, ...; at the
// end the warps' sums meet in shared memory. While a group is computed the next one is loaded.
#include <cuda_bf16.h>

constexpr int kWarps = 8, kGroup = 128, kSteps = kGroup / 32, kTiles = 4;

#ifndef KVBLOCK_EMULATOR
// C [16, 8] += A [16, 16] B [16, 8] of a warp.
__device__ __forceinline__ void Mma(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                    unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two numbers less 136, which is exact: both are 128 ... 143.
__device__ __forceinline__ unsigned Less136(unsigned pair) {
  unsigned less;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;"
      : "=r"(less)
      : "r"(pair), "r"(0x3f803f80u), "r"(0xc308c308u));  // times 1, plus -136
  return less;
}
#endif

// Numbers 2 i and 2 i + 1 of a word, less 8, in bfloat16. Behind the bits of 128 they are 128 + n.
__device__ __forceinline__ unsigned PairOf(unsigned word, int i) {
  return Less136((word >> 4 * i & 0x000f000fu) | 0x43004300u);
}

template <int kBands>
__global__ void __launch_bounds__(kWarps * 32)
    w4a16(const __nv_bfloat16* __restrict__ x, const uint4* __restrict__ w,
          const float* __restrict__ scales, __nv_bfloat16* __restrict__ y, int m, int k, int n) {
  __shared__ float sums[kWarps][16][kBands * 32 + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  const int groups = k / kGroup, bands = n / 32, first = blockIdx.x * kBands;
  const uint4 none = {0, 0, 0, 0};
  const bool low = row < m, high = row + 8 < m;

  float total[kBands][kTiles][4] = {};
  uint4 words[kSteps][kBands];
  auto load = [&](int group, int step, int band) {
    const long long block = (static_cast<long long>(group) * kSteps + step) * bands + first + band;
    words[step][band] = __ldcs(w + block * 32 + lane);
  };
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
      if (warp < groups) load(warp, step, band);
    }
  }
  for (int group = warp; group < groups; group += kWarps) {
    float sum[kBands][kTiles][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const long long column = static_cast<long long>(group) * kGroup + step * 32 + quad * 8;
      const __nv_bfloat16* here = x + row * static_cast<long long>(k) + column;
      const __nv_bfloat16* below = here + 8 * static_cast<long long>(k);
      const uint4 top = low ? *reinterpret_cast<const uint4*>(here) : none;
      const uint4 bottom = high ? *reinterpret_cast<const uint4*>(below) : none;
      const unsigned a0[4] = {top.x, bottom.x, top.y, bottom.y};
      const unsigned a1[4] = {top.z, bottom.z, top.w, bottom.w};
#pragma unroll
      for (int band = 0; band < kBands; ++band) {
        const uint4 now = words[step][band];
        if (group + kWarps < groups) load(group + kWarps, step, band);
        const unsigned of_tile[kTiles] = {now.x, now.y, now.z, now.w};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          Mma(sum[band][tile], a0, PairOf(of_tile[tile], 0), PairOf(of_tile[tile], 1));
          Mma(sum[band][tile], a1, PairOf(of_tile[tile], 2), PairOf(of_tile[tile], 3));
        }
      }
    }
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const long long column = (first + band) * 32 + tile * 8 + quad * 2;
        const float* scale = scales + static_cast<long long>(group) * n + column;
#pragma unroll
        for (int i = 0; i < 4; ++i) total[band][tile][i] += scale[i % 2] * sum[band][tile][i];
      }
    }
  }
#pragma unroll
  for (int band = 0; band < kBands; ++band) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = band * 32 + tile * 8 + quad * 2 + i % 2;
        sums[warp][row + i / 2 * 8][column] = total[band][tile][i];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < m * kBands * 32; i += kWarps * 32) {
    const int at = i / (kBands * 32), column = i % (kBands * 32);
    float sum = 0.0f;
    for (int part = 0; part < kWarps; ++part) sum += sums[part][at][column];
    y[static_cast<long long>(at) * n + first * 32 + column] = __nv_bfloat16(sum);
  }
}
