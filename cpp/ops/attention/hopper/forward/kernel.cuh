// Attention forward on Hopper's warpgroup products (wgmma, sm_90a), any mask.
//
//   S = Q K^T,  P = exp(scale S - reference),  O = P V / rowsum(P),  lse = reference + log(rowsum)
//
// A CTA has two or three warpgroups that compute (the consumers), each with 64 query rows of the
// CTA's query tile, and one that does everything else, with few registers: a warp that plans, a
// thread that loads and a warp that writes. Keys in blocks have a warpgroup that loads. CTAs stay
// for the whole launch and compute one query tile (Item) after the other.
//
// The planner decides which query tiles are this CTA's (ForwardParams) and walks through the KV
// tiles that each can see (TileWalk). It writes down the items and, for each KV tile, a Step: where
// the tile begins, whether it needs a mask, whether it is the last of its item. It is up to kSteps
// steps ahead of the consumers, so what it takes to plan a tile is never waited for.
//
// The loader follows the steps with bulk tensor copies. Q has one or two places in shared memory, K
// and V have kKvStages each. Every place has two barriers: `full`, at which the loader and the
// copies arrive, and `empty`, at which every warp of the consumers arrives.
//
// In a cluster of two, the CTAs have the same query tile of two heads that share K and V, or
// neighbouring query tiles of a head, and go through the same KV tiles. Each loads half of the rows
// of K and V into both, so consumers arrive at `empty` in both.
//
//   loader:  K0 Q | K1 V0 | K2 V1 | ... | K0 of the next item, its Q, V(last) | ...
//
// A consumer multiplies one tile ahead: while it turns the scores of tile j into probabilities, the
// tensor cores work on P V of tile j - 1. With two places for Q, tile 0 of the next item takes its
// turn as tile j does, and the item before is written when its last product is there.
//
//   S = Q K(0);  finish scores, mask, P
//   for j = 1, 2, ...:
//     issue S = Q K(j);  look at sums of j - 1    IssueScores, TakeSums
//     issue O += P V(j - 1)                       IssueValues; the first begins O
//     wait for S;  finish scores, mask            Finish
//     maxima, or none;  K(j) is free              FollowMaxima, LeaveScores
//     half of the exponentials                    Exponentials
//     wait for O;  rescale O                      Rescale
//     the other half;  P = S in 16 bits           Exponentials, PackProbabilities
//   O += P V(last);  write O and lse              WriteItem
//
// With two places for Q there is one for O, too: consumers leave O there, and the writer stores it
// while they go on with the next item. Otherwise they store it themselves.
//
// A joined call's o and lse hold the attention to other keys. The writer brings an item's o to that
// place, and its lse, when it has stored the item before. Consumers join O with it there.
//
// With `turns` the consumers issue their products one after the other, in a ring of hardware
// barriers, so that one's softmax runs under the products of the others.
//
// With a softcap exponents are polynomials of the products, of a degree that the warp's largest one
// allows; only beyond these are scores capped by themselves (Cap).
//
// Rows are scaled to a reference that follows their maximum only when the maximum has outgrown it
// by a factor of 2^8: probabilities of up to 2^8 do no harm, and O is hardly ever rescaled. In
// bfloat16 (Consumer::kTrusts) nobody looks for maxima after an item's first tile, since exponents
// reach as far as float32's there: up to 2^64 no harm is done either. Sums tell whose scores grow.
// Beyond 2^24 the row's warp looks for maxima until the item ends; beyond 2^64 that tile's
// probabilities are computed once more (scores_again.cuh) before they meet V. With dropout, steps
// where none of this is due, nor a mask, have a loop of their own (consumer_usual.cuh).
//
// Keys of a tile that are none of this sequence's (past kv_lens, in the next packed sequence, in an
// unlisted tile) come along with the copy. Their scores are masked, and their rows of V are cleared
// (ClearRows), since a probability of 0 does not cancel a NaN.
//
// Operands in 8 bits (narrow_rows.cuh) come with V transposed (transpose_values.cuh), and with
// scales, of which the planner makes one for the scores of each step. Tensor cores keep fewer bits
// of a long sum of such products than float32 has; so P V is summed over a few tiles at a time, and
// consumers add that to O. Probabilities are computed as the codes of e4m3, and their sums come as
// one more column of P V. Consumers issue P V of tile j - 1 in front of S of tile j there: codes of
// tile j then go where those of tile j - 1 were, and O is added to while S is computed.
//
// Keys in the blocks of a cache come to the same places, by whole warps, which are a warpgroup
// where registers allow it: by bulk copies of parts of blocks (block_loader.cuh) or, where blocks
// are too small, row by row (row_loader.cuh). Of 8 bits V comes from V^T, which a launch in front
// has made of the blocks (narrow_pages.cuh), a tile by one bulk copy.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/cluster.cuh"
#include "device/dependent.cuh"
#include "device/mbarrier.cuh"
#include "device/shared.cuh"
#include "device/tensor_copy.cuh"
#include "device/warpgroup.cuh"
#include "ops/attention/hopper/forward/block_loader.cuh"
#include "ops/attention/hopper/forward/consumer.cuh"
#include "ops/attention/hopper/forward/consumer_narrow.cuh"
#include "ops/attention/hopper/forward/consumer_trust.cuh"
#include "ops/attention/hopper/forward/consumer_usual.cuh"
#include "ops/attention/hopper/forward/loader.cuh"
#include "ops/attention/hopper/forward/planner.cuh"
#include "ops/attention/hopper/forward/row_loader.cuh"
#include "ops/attention/hopper/forward/shared.cuh"
#include "ops/attention/hopper/forward/writer.cuh"

namespace kvblock::hopper {

// One of the warps that load keys from blocks.
template <typename Traits>
__device__ __forceinline__ void LoadPages(const typename Traits::Params& p, const ForwardMaps& maps,
                                          ForwardShared<Traits>& shared, int warp) {
  warp = __shfl_sync(~0u, warp, 0);  // the same for all lanes, which the compiler must see
  if (p.box_rows == 0) {
    RowLoader<Traits>(p, maps, shared, warp).Run();
  } else {
    BlockLoader<Traits>(p, maps, shared, warp).Run();
  }
  __syncwarp();
}

// Ones (e4m3) behind V's columns, which copies leave alone.
template <typename Traits>
__device__ __forceinline__ void WriteOnes(ForwardShared<Traits>& shared) {
  constexpr uint32_t kFourOnes = 0x38383838;
  constexpr int kWords = Traits::kOnes * kChunkRowBytes / 4;
  for (int i = threadIdx.x; i < Traits::kStages * kWords; i += Traits::kThreads) {
    char* const ones = shared.v[i / kWords] + (Traits::kValueRows - Traits::kOnes) * kChunkRowBytes;
    reinterpret_cast<uint32_t*>(ones)[i % kWords] = kFourOnes;
  }
  FenceAsync();
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    AttentionForward(const __grid_constant__ typename Traits::Params p,
                     const __grid_constant__ ForwardMaps maps) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  auto& shared = DynamicSharedAs<ForwardShared<Traits>>();
  constexpr int kWarps = Traits::kConsumers * 4;
  if (Traits::kPaged) LetNextLaunchBegin();  // it waits for pieces of the one in front
  if (threadIdx.x == 0) {
    PrefetchTensorMap(maps.q);
    if (LoadsBoxes<Traits>(p)) {
      PrefetchTensorMap(maps.k);
      PrefetchTensorMap(maps.v);
    }
    PrefetchTensorMap(maps.o);
#pragma unroll
    for (int stage = 0; stage < Traits::kQueryStages; ++stage) {
      BarrierInit(SharedAddress(&shared.q_full[stage]), kQueryArrivals<Traits>);
      BarrierInit(SharedAddress(&shared.q_empty[stage]), kWarps);
    }
#pragma unroll
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      BarrierInit(SharedAddress(&shared.k_full[stage]), LoadArrivals<Traits>(p));
      BarrierInit(SharedAddress(&shared.k_empty[stage]), kWarps * Traits::kCluster);
      BarrierInit(SharedAddress(&shared.v_full[stage]), ValueArrivals<Traits>(p));
      BarrierInit(SharedAddress(&shared.v_empty[stage]), kWarps * Traits::kCluster);
    }
#pragma unroll
    for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
      BarrierInit(SharedAddress(&shared.o_full[consumer]), kWarpgroup);
      BarrierInit(SharedAddress(&shared.o_empty[consumer]), 32);
    }
    if constexpr (Traits::kJoins) {
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        BarrierInit(SharedAddress(&shared.joined.item_full[item]), 1);
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      BarrierInit(SharedAddress(&shared.step_full[step]), 1);
      BarrierInit(SharedAddress(&shared.step_empty[step]), kStepReaders<Traits>);
    }
    FenceBarrierInit();
  }
  if constexpr (Traits::kPaged) ClearSpareQueries(p, shared);
  if constexpr (Traits::kNarrow) WriteOnes(shared);
  if (Traits::kCluster > 1) {
    ClusterMeet();
  } else {
    __syncthreads();
  }
  // The same for all lanes of a warp, which the compiler must see.
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (group == 0) {
    GiveRegisters<Traits::kTiles.producer_registers>();
    if (threadIdx.x < 32) {
      Planner<Traits>(p, shared).Run();
    } else if (Traits::kLoadWarps == 2 && threadIdx.x / 32 % 2 == 1) {
      if constexpr (Traits::kPaged) LoadPages<Traits>(p, maps, shared, threadIdx.x / 64);
    } else if (!Traits::kPaged && threadIdx.x == 32) {
      if constexpr (!Traits::kPaged) Loader<Traits>(maps, shared).Run();
    } else if (Traits::kStagesOutput && threadIdx.x >= 64 && threadIdx.x < 96) {
      Writer<Traits>(p, maps.o, shared).Run();
    }
    __syncwarp();
  } else if (Traits::kLoadGroups > 0 && group == Traits::kConsumers + 1) {
    if constexpr (Traits::kLoadGroups > 0) {
      GiveRegisters<Traits::kTiles.loader_registers>();
      LoadPages<Traits>(p, maps, shared, threadIdx.x % kWarpgroup / 32);
    }
  } else {
    TakeRegisters<Traits::kTiles.consumer_registers>();
    Consumer<Traits>(p, shared, group - 1).Run();
  }
  if (Traits::kCluster > 1) ClusterMeet();  // the others still arrive at this CTA's barriers
  // This launch must not end before the one in front of it.
  if (Traits::kPaged && blockIdx.x == 0) AwaitPriorLaunch();
#endif
}

}  // namespace kvblock::hopper
