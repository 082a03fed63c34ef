// What warpgroups do alike that share the products of 64 keys (split_products.cuh,
// split_products_cluster.cuh): kGroup 0 has S, P and dV, kGroup 1 dP, dS and dK.
#pragma once

#include <cstdint>

#include "ops/attention/hopper/backward/worker.cuh"

namespace kvblock::hopper {

// Rows that take no part become zeros, because dK or dV sums over them. By kGroup 0 alone: it tells
// the other one by handing over P.
template <typename Tile, typename Worker>
__device__ __forceinline__ void ClearQueries(const Worker& w, uint32_t tile,
                                             const BackwardStep& at) {
  if (at.flags & BackwardStep::kPartial) {
    ZeroRows<Tile>(w.cta.Bytes(tile), w.sequence().q_len - at.first, w.thread, kWarpgroup);
    FenceAsync();
    BarrierMeet(kWarpgroupMeets, kWarpgroup);
  }
}

template <typename Worker>
__device__ __forceinline__ auto ScoresOf(const Worker& w, const BackwardStep& at) {
  return w.template Scores<Worker::kQueries / 2>(w.cta.owned().first_key, at.first, at.head,
                                                 at.flags);
}

template <typename Worker>
__device__ __forceinline__ auto DropoutOf(const Worker& w, const BackwardStep& at) {
  return w.DropoutOf(w.cta.owned().first_key, at.first, at.head);
}

// Adds this warpgroup's blocks of 8 columns of dQ, from first_block on, for the 64 queries from
// `first` on.
template <typename Worker, int kCount>
__device__ __forceinline__ void AddDq(const Worker& w, const float (&dq)[kCount], int head,
                                      int first, int first_block) {
  float* const to =
      DqTile(w.p(), w.sequence(), head, first) + first_block * (kDqRows * 8) + w.thread * 4;
#pragma unroll
  for (int n = 0; n < kCount / 4; ++n) {
    if ((first_block + n) * 8 < w.p().head_dim) {
      ReduceAdd(to + n * (kDqRows * 8), dq[n * 4], dq[n * 4 + 1], dq[n * 4 + 2], dq[n * 4 + 3]);
    }
  }
}
// With turns (dq_turns.cuh): waits for this warpgroup's, and hands it on.
template <typename Worker>
__device__ __forceinline__ void AwaitTurn(const Worker& w, int step) {
  if (w.p().dq_turns != nullptr) BarrierWait(w.cta.MayAdd(w.group), step % 2);
}
template <typename Worker>
__device__ __forceinline__ void PassTurn(const Worker& w) {
  if (w.p().dq_turns != nullptr) BarrierPass(kTurnTakersMeet + w.group, kWarpgroup + 32);
}

// A worker of either kind, from the first step to the last store.
template <int kGroup, typename Worker>
__device__ __forceinline__ void RunGroup(const Worker& worker) {
  if constexpr (kGroup == 0) {
    worker.RunValues();
  } else {
    worker.RunKeys();
  }
  BarrierMeet(kWorkersMeet, worker.w.kWorkers);
  worker.w.StoreKeys();
}

}  // namespace kvblock::hopper
