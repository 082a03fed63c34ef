// Tiles of queries whose keys are shared out, in Hopper's forward kernel over keys in blocks
// (kernel.cuh): where there are fewer tiles than multiprocessors, as of a chunk of a prompt behind
// a long prefix.
//
// An item is a piece then: some of the KV tiles of a tile of queries. What a piece comes to goes to
// the workspace. Each of its consumers counts itself; who is the last one of its rows puts all
// pieces together, always in the same order, and goes on as if it had computed all of them. Nobody
// waits for anybody.
#pragma once

#include <cfloat>
#include <cstdint>

#include "device/fast_math.cuh"
#include "device/mbarrier.cuh"
#include "ops/attention/hopper/forward/rows.cuh"

namespace kvblock::hopper {

// A thread's part of what a consumer has of a piece, which the same thread of another CTA reads:
// elements are a warpgroup apart. O, then references and sums.
template <typename Traits>
__device__ __forceinline__ float4* PieceOf(const typename Traits::Params& p, int slot, int group,
                                           int thread) {
  constexpr int64_t kEach = (Traits::kValueDim / 8 + 1) * kWarpgroup;
  return reinterpret_cast<float4*>(p.pieces) +
         (int64_t{slot} * Traits::kConsumers + group) * kEach + thread;
}

template <typename Traits>
__device__ __forceinline__ void StorePiece(float4* at, const RowSums& sums,
                                           const Rows<Traits>& rows) {
#pragma unroll
  for (int n = 0; n < Traits::kValueDim / 8; ++n) {
    const float* const o = rows.state.o[0][n];
    at[n * kWarpgroup] = make_float4(o[0], o[1], o[2], o[3]);
  }
  at[Traits::kValueDim / 8 * kWarpgroup] =
      make_float4(sums.reference[0], sums.reference[1], sums.sum[0], sums.sum[1]);
}

// Whether this consumer is the last that leaves a piece of its rows. All its threads; `barrier`: a
// hardware barrier of theirs, `last`: a word of shared memory.
__device__ __forceinline__ bool IsLastPiece(int32_t* arrived, int pieces, int thread, int barrier,
                                            bool* last) {
  __threadfence();
  BarrierMeet(barrier, kWarpgroup);
  if (thread == 0) *last = atomicAdd(arrived, 1) == pieces - 1;
  BarrierMeet(barrier, kWarpgroup);
  __threadfence();
  return *last;
}

// Rows as all pieces together leave them; `at`: of the first, `apart`: of the next one.
template <typename Traits>
__device__ __forceinline__ RowSums JoinPieces(const float4* at, int64_t apart, int pieces,
                                              Rows<Traits>& rows) {
  constexpr int kSums = Traits::kValueDim / 8 * kWarpgroup;
  RowSums joined;
#pragma unroll 1
  for (int piece = 0; piece < pieces; ++piece) {
    const float4 own = __ldcg(at + piece * apart + kSums);
    joined.reference[0] = fmaxf(joined.reference[0], own.x);
    joined.reference[1] = fmaxf(joined.reference[1], own.y);
  }
  float* const o = rows.o();
#pragma unroll
  for (int i = 0; i < Traits::kValueDim / 2; ++i) o[i] = 0.0f;
#pragma unroll 1
  for (int piece = 0; piece < pieces; ++piece) {
    const float4* const own = at + piece * apart;
    const float4 sums = __ldcg(own + kSums);
    const float part[2] = {Exp2(sums.x - joined.reference[0]), Exp2(sums.y - joined.reference[1])};
    joined.sum[0] = fmaf(sums.z, part[0], joined.sum[0]);
    joined.sum[1] = fmaf(sums.w, part[1], joined.sum[1]);
#pragma unroll
    for (int n = 0; n < Traits::kValueDim / 8; ++n) {
      const float4 x = __ldcg(own + n * kWarpgroup);
      o[n * 4] = fmaf(x.x, part[0], o[n * 4]);
      o[n * 4 + 1] = fmaf(x.y, part[0], o[n * 4 + 1]);
      o[n * 4 + 2] = fmaf(x.z, part[1], o[n * 4 + 2]);
      o[n * 4 + 3] = fmaf(x.w, part[1], o[n * 4 + 3]);
    }
  }
  return joined;
}

}  // namespace kvblock::hopper
