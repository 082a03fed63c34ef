// Gradients of keys and values, and by the way of queries, on Hopper's tensor cores (sm_90a).
//
// One CTA owns kKeys keys of one KV head and walks over the query heads of its group and, for each,
// over the tiles of kQueries queries that see them. K, V and the sums dK and dV stay with it, so dK
// and dV are written once, in a fixed order. A step is one tile of queries:
//
//   S^T  = K Q^T    P^T  = exp(scale S^T - lse)      dV += P^T dO
//   dP^T = V dO^T   dS^T = P^T (dP^T - delta)        dK += dS^T Q      times scale at the end
//   dQ   = dS K     added to dq_accum in global memory, unscaled (dq_tile.cuh)
//
// Three warpgroups have roles and registers of their own:
//
//   loader    one warp walks over the tiles, starts the copies of Q and dO, and prepares lse and
//             delta (loader.cuh); two add dQ to dq_accum (adder.cuh), or, where
//             the workers do that, take turns for a dQ that is the same every time
//             (dq_turns.cuh). The copies of K and V and, but in clusters, the first step
//             are started during the set-up, by the first two warps; the fourth does nothing
//   workers   two warpgroups compute. They own 64 keys each (narrow.cuh): S^T and dP^T in
//             the registers of one become the A operands of its dV and dK, and only dQ, which sums
//             over all keys, needs the dS of both. With head dim 192 and value dim 128 there are
//             fewer registers to spare (uneven.cuh). Above, the sums of 64 keys do not
//             fit; one then computes S, P and dV, the other dP, dS and dK (wide.cuh), for
//             head dim 256 in clusters of two CTAs that share dQ (pair.cuh).
//
// Products of a warpgroup run one after the other while it goes on, so each step issues them early
// and waits late. Those of head dims up to 128, and what runs under them:
//
//   S, dP   P, or, interleaved (narrow.cuh), its first part
//   dV      dS, in shared memory, becomes visible to the other warpgroup
//   dQ
//   dK      dQ goes to shared memory
//
// Barriers in shared memory (BackwardShape): "full" tells that a stage of Q, lse and delta or of dO
// has landed, "free" that whoever looks at it has read it; kScoresReady, wide, that dS of a
// step is written, or, uneven, that dQ has read it; kDqFull and kDqFree that dQ is handed to the
// warp that adds it, and read; wide, kPReady and kPFree that P is handed over and that its place is
// free. In a cluster, kPeerKFull tells that the other CTA's K has landed, kPeerQFree and
// kPeerDoFree that a stage is free there, kPeerDsFull that its dS has come, kPeerDsSent that this
// one's dS has come there, and kPeerDsFree that it has been multiplied.
//
// TMA fills rows and columns outside of an array with zeros. Rows inside of it that take no part
// (past q_len or kv_len, or of another packed sequence) may hold anything: their scores are masked,
// and the workers clear the rows of Q, dO and K, over which products sum.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/cluster.cuh"
#include "ops/attention/hopper/backward/adder.cuh"
#include "ops/attention/hopper/backward/dq_turns.cuh"
#include "ops/attention/hopper/backward/loader.cuh"
#include "ops/attention/hopper/backward/narrow.cuh"
#include "ops/attention/hopper/backward/pair.cuh"
#include "ops/attention/hopper/backward/uneven.cuh"
#include "ops/attention/hopper/backward/wide.cuh"
#include "ops/attention/schedule/grid_order.cuh"

namespace kvblock::hopper {

template <typename T, typename Shape, bool kPlain>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    AttentionBackwardKv(const __grid_constant__ AttentionParams p,
                        const __grid_constant__ BackwardMaps maps) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread / 32, 0);

  constexpr BackwardRegisters kRegisters =
      kPlain ? Shape::kPlainRegisters : Shape::kGeneralRegisters;
  const bool has_dq = p.dq_accum != nullptr, turns = has_dq && p.dq_turns != nullptr;

  // Whose keys these are. For a dq that is the same every time the last tiles come first
  // (dq_turns.cuh).
  const GridPlace place = FirstTilesFirst(p, blockIdx.x / Shape::kCluster);
  const int nth = place.tile, tile = turns ? p.tiles - 1 - nth : nth;
  const int kv_head = place.pair % p.num_kv_heads;
  Sequence found;
  int first_key;
  if (!FindTile<Along::kKeys, Shape::kClusterKeys>(p, place.pair / p.num_kv_heads, tile, &found,
                                                   &first_key)) {
    return;
  }
  if (Shape::kPaired) first_key += ClusterRank() * Shape::kKeys;
  BackwardOwned& owned = *reinterpret_cast<BackwardOwned*>(shared + Shape::kOwned);
  const BackwardLoader<Shape, kPlain> loader{p, maps, shared, base, thread % 32};
  if (thread == 0) {
    owned.sequence = found;
    owned.first_key = first_key;
    owned.kv_head = kv_head;
    constexpr int kWarps = Shape::kWorkers / 32;
    BarrierInit(base + Shape::kKFull, 1);
    BarrierInit(base + Shape::kVFull, 1);
    BarrierInit(base + Shape::kScoresReady, Shape::kWide ? kWarps / 2 : kWarps);
    BarrierInit(base + Shape::kScoresReady + 8, kWarps / 2);
    BarrierInit(base + Shape::kPReady, kWarpgroup);
    BarrierInit(base + Shape::kPFree, kWarpgroup);
    BarrierInit(base + Shape::kMayAdd, 1);
    BarrierInit(base + Shape::kMayAdd + 8, 1);
    // Threads of two more warps that look at each step.
    const int lookers = Shape::kWide ? (turns ? 2 * 32 : 0) : (has_dq ? 2 : 0);
    for (int i = 0; i < Shape::kStages; ++i) {
      BarrierInit(base + Shape::kQFull + i * 8, 1 + 32);  // the copy, and lse and delta
      BarrierInit(base + Shape::kQFree + i * 8, Shape::kWorkers + lookers);
      BarrierInit(base + Shape::kDoFull + i * 8, 1);
      BarrierInit(base + Shape::kDoFree + i * 8, kWarps);
    }
    for (int i = 0; i < Shape::kDqStages * 2; ++i) {
      BarrierInit(base + Shape::kDqFull + i * 8, kWarpgroup);
      BarrierInit(base + Shape::kDqFree + i * 8, 1);
    }
    if constexpr (Shape::kPaired) {
      BarrierInit(base + Shape::kPeerKFull, 1);
      BarrierInit(base + Shape::kPeerDsFull, 1);
      BarrierInit(base + Shape::kPeerDsFree, kWarps);
      BarrierInit(base + Shape::kPeerDsSent, 1);
      for (int i = 0; i < Shape::kStages; ++i) {
        BarrierInit(base + Shape::kPeerQFree + i * 8, 1);
        BarrierInit(base + Shape::kPeerDoFree + i * 8, 1);
      }
    }
    FenceBarrierInit();
    loader.LoadKeys();
  }
  const auto meet = [] {
    if constexpr (Shape::kPaired) {
      ClusterMeet();
    } else {
      __syncthreads();
    }
  };
  if (warp == 0) {
    __syncwarp();
    BarrierPass(kLoaderBegins, 2 * 32);
  }
  if (warp == 1) loader.Begin(found, first_key, kv_head);
  if (warp < kWarpgroup / 32) {
    GiveRegisters<kRegisters.loader>();
    meet();
    if (warp == 0) {
      loader.Run();
    } else if (warp < 3) {
      if constexpr (!Shape::kWide) {
        if (has_dq && ElectLane()) BackwardAdder<Shape>{p, shared, base, warp - 1, nth}.Run();
      } else if (turns) {
        BackwardTurns<Shape>{p, shared, base, warp - 1, thread % 32, nth}.Run();
      }
    }
  } else {
    TakeRegisters<kRegisters.worker>();
    meet();
    const int group = warp / (kWarpgroup / 32) - 1, worker = thread % kWarpgroup;
    if constexpr (!Shape::kWide) {
      using Worker = std::conditional_t<Shape::kUneven, UnevenWorker<T, Shape, kPlain>,
                                        NarrowWorker<T, Shape, kPlain>>;
      Worker{{p, maps, shared, base, group, worker}}.Run();
    } else {
      const auto run = [&](auto number) {
        constexpr int kGroup = decltype(number)::value;
        using Worker = std::conditional_t<Shape::kPaired, PairWorker<T, Shape, kPlain, kGroup>,
                                          WideWorker<T, Shape, kPlain, kGroup>>;
        RunGroup<kGroup>(Worker{p, maps, shared, base, kGroup, worker});
      };
      if (group == 0) {
        run(std::integral_constant<int, 0>{});
      } else {
        run(std::integral_constant<int, 1>{});
      }
    }
  }
  if constexpr (Shape::kPaired) ClusterMeet();  // the other CTA still writes here, and arrives
}

}  // namespace kvblock::hopper
