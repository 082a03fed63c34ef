// y = x w for few rows of x: x and y in bfloat16, w in 4 bits with a scale for each 128 rows of a
// column. Reading w is all the time there is, so w lies as the tensor cores want it.
//
//   x [M, K], M <= 16; y [M, N]; scales [K / 128, N]; w [K / 32, N / 32, lane 32, tile 4] words.
//
// A word has 8 numbers of one column: rows 32 b + 8 (lane % 4) + 0 ... 7 of column
// 32 c + 8 tile + lane / 4. A product sums over rows, in whatever order: so a lane takes 8
// neighbours of x by one load of 16 bytes, and what it has of w goes with them.
//
// A CTA has 32 kBands columns and 16 warps. Warp i takes groups of 128 rows i, i + 16, ..., half a
// group at a time. Each warp has stages of its own in shared memory: while it computes, the next
// two halves are on their way, x, w and scales, so that a multiprocessor always asks memory for
// some 70 KiB. At the end the warps' sums meet in shared memory.
#include <cuda_bf16.h>

constexpr int kWarps = 16, kGroup = 128, kHalf = kGroup / 2, kSteps = kHalf / 32, kTiles = 4;
constexpr int kStages = 3;

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

// 16 bytes to shared memory; this thread's copies form groups, of which it waits for all but kLast.
__device__ __forceinline__ void Copy16(void* to, const void* from) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from) : "memory");
}
__device__ __forceinline__ void EndCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLast>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLast) : "memory");
}
extern __shared__ uint4 shared[];
#endif

// Numbers 2 i and 2 i + 1 of a word, less 8, in bfloat16. Behind the bits of 128 they are 128 + n.
__device__ __forceinline__ unsigned PairOf(unsigned word, int i) {
  return Less136((word >> 4 * i & 0x000f000fu) | 0x43004300u);
}

// What a warp has of half a group: x's rows, those of w that go with them; of the second half also
// the group's scales.
template <int kBands>
struct Stage {
  uint4 x[16 * kHalf / 8];
  uint4 w[kSteps][kBands][32];
  float scales[kBands * 32];
};
// Where 8 neighbours of a row of x lie: two rows that are read together have different banks.
__device__ __forceinline__ int PlaceOf(int row, int eighth) {
  return row * (kHalf / 8) + (eighth ^ row % 2 * 4);
}

template <int kBands>
__global__ void __launch_bounds__(kWarps * 32, 1)
    w4a16(const __nv_bfloat16* __restrict__ x, const uint4* __restrict__ w,
          const float* __restrict__ scales, __nv_bfloat16* __restrict__ y, int m, int k, int n) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  const int groups = k / kGroup, bands = n / 32, first = blockIdx.x * kBands;
  Stage<kBands>* const stages = reinterpret_cast<Stage<kBands>*>(shared) + warp * kStages;

  // Half a group; also where there is none, so that the last ones are waited for.
  auto load = [&](int group, int half, Stage<kBands>& to) {
    if (group < groups) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const long long block = (group * 2ll + half) * kSteps + step;
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
          Copy16(&to.w[step][band][lane], w + (block * bands + first + band) * 32 + lane);
        }
      }
      // Nobody looks at what rows from m on give.
      for (int i = lane; i < m * (kHalf / 8); i += 32) {
        const int of_row = i / (kHalf / 8), eighth = i % (kHalf / 8);
        const int column = group * kGroup + half * kHalf + eighth * 8;
        Copy16(&to.x[PlaceOf(of_row, eighth)], x + static_cast<long long>(of_row) * k + column);
      }
      if (half == 1 && lane < kBands * 8) {
        const float* const from = scales + static_cast<long long>(group) * n + first * 32;
        Copy16(&to.scales[lane * 4], from + lane * 4);
      }
    }
    EndCopies();
  };
  load(warp, 0, stages[0]);
  load(warp, 1, stages[1]);

  float total[kBands][kTiles][4] = {};
  int at = 0;
  for (int group = warp; group < groups; group += kWarps) {
    float sum[kBands][kTiles][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      WaitForCopies<kStages - 2>();
      __syncwarp();  // for all lanes; and all are done with the half before
      load(group + kWarps, half, stages[(at + kStages - 1) % kStages]);
      const Stage<kBands>& here = stages[at];
      at = (at + 1) % kStages;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint4 top = here.x[PlaceOf(row, step * 4 + quad)];
        const uint4 bottom = here.x[PlaceOf(row + 8, step * 4 + quad)];
        const unsigned a0[4] = {top.x, bottom.x, top.y, bottom.y};
        const unsigned a1[4] = {top.z, bottom.z, top.w, bottom.w};
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
          const uint4 words = here.w[step][band][lane];
          const unsigned of_tile[kTiles] = {words.x, words.y, words.z, words.w};
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            Mma(sum[band][tile], a0, PairOf(of_tile[tile], 0), PairOf(of_tile[tile], 1));
            Mma(sum[band][tile], a1, PairOf(of_tile[tile], 2), PairOf(of_tile[tile], 3));
          }
        }
      }
      if (half == 0) continue;
#pragma unroll
      for (int band = 0; band < kBands; ++band) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const float* const scale = &here.scales[band * 32 + tile * 8 + quad * 2];
#pragma unroll
          for (int i = 0; i < 4; ++i) total[band][tile][i] += scale[i % 2] * sum[band][tile][i];
        }
      }
    }
  }

  __syncthreads();  // all are done with their stages
  constexpr int kPitch = kBands * 32 + 1;
  float* const sums = reinterpret_cast<float*>(shared);  // [warp, row, column]
#pragma unroll
  for (int band = 0; band < kBands; ++band) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = band * 32 + tile * 8 + quad * 2 + i % 2;
        sums[(warp * 16 + row + i / 2 * 8) * kPitch + column] = total[band][tile][i];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < m * kBands * 32; i += kWarps * 32) {
    const int of_row = i / (kBands * 32), column = i % (kBands * 32);
    float sum = 0.0f;
    for (int part = 0; part < kWarps; ++part) sum += sums[(part * 16 + of_row) * kPitch + column];
    y[static_cast<long long>(of_row) * n + first * 32 + column] = __nv_bfloat16(sum);
  }
}
