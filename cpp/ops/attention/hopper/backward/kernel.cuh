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
// With dropout P of dV and dP are 0 of pairs that are dropped. All sums are 1 - rate times what
// comes out, and so is delta.
//
// Three warpgroups have roles and registers of their own:
//
//   loader    one warp walks over the tiles, starts the copies of Q and dO, and prepares lse and
//             delta (loader.cuh); two add dQ to dq_accum (adder.cuh), or, where the workers do
//             that, take turns for a dQ that is the same every time (dq_turns.cuh). The copies of K
//             and V and, but in clusters, the first step are started during the set-up, by the
//             first two warps; the fourth does nothing
//   workers   two warpgroups compute (worker.cuh). Up to head dim 128 and for 192 by 128 they split
//             the keys, 64 each (own_keys.cuh): S^T and dP^T in the registers of one become the A
//             operands of its dV and dK, and only dQ, which sums over all keys, needs the dS of
//             both. S and dP are computed at the same time (split_keys.cuh), or, for 192 by 128,
//             one after the other, since there are fewer registers to spare
//             (split_keys_sequential.cuh). Above, the sums of 64 keys do not fit into the registers
//             of one, and they split the products (own_products.cuh): one computes S, P and dV, the
//             other dP, dS and dK, and both dQ (split_products.cuh); for head dim 256 clusters of
//             two CTAs share dQ, too (split_products_cluster.cuh)
//
// Products of a warpgroup run one after the other while it goes on, so each step issues them early
// and waits late. Those of head dims up to 128, and what runs under them:
//
//   S, dP   P, or, interleaved (split_keys.cuh), its first part
//   dV      dS, in shared memory, becomes visible to the other warpgroup
//   dQ
//   dK      dQ goes to shared memory
//
// shared.cuh has the tiles and the barriers in shared memory.
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
#include "ops/attention/hopper/backward/split_keys.cuh"
#include "ops/attention/hopper/backward/split_keys_sequential.cuh"
#include "ops/attention/hopper/backward/split_products.cuh"
#include "ops/attention/hopper/backward/split_products_cluster.cuh"
#include "ops/attention/schedule/grid_order.cuh"
#include "ops/attention/schedule/longest_first.cuh"

namespace kvblock::hopper {

// One thread. `readers`: of the loader's warpgroup, threads that look at each step.
template <typename Shape>
__device__ __forceinline__ void InitBarriers(const BackwardCta<Shape>& cta, int readers) {
  constexpr int kWarps = Shape::kWorkers / 32;
  BarrierInit(cta.KFull(), 1);
  BarrierInit(cta.VFull(), 1);
  BarrierInit(cta.DsFull(0), Shape::kSplitsProducts ? kWarps / 2 : kWarps);
  BarrierInit(cta.DsFull(1), kWarps / 2);
  BarrierInit(cta.PFull(), kWarpgroup);
  BarrierInit(cta.PFree(), kWarpgroup);
  BarrierInit(cta.MayAdd(0), 1);
  BarrierInit(cta.MayAdd(1), 1);
  for (int i = 0; i < Shape::kStages; ++i) {
    BarrierInit(cta.QFull(i), 1 + 32);  // the copy, and lse and delta
    BarrierInit(cta.QFree(i), Shape::kWorkers + readers);
    BarrierInit(cta.GradsFull(i), 1);
    BarrierInit(cta.GradsFree(i), kWarps);
  }
  if constexpr (!Shape::kSplitsProducts) {
    for (int i = 0; i < Shape::kDqParts; ++i) {
      BarrierInit(cta.DqFull(i), kWarpgroup);
      BarrierInit(cta.DqFree(i), 1);
    }
  }
  if constexpr (Shape::kClustered) {
    BarrierInit(cta.PeerKFull(), 1);
    BarrierInit(cta.PeerDsFull(), 1);
    BarrierInit(cta.PeerDsFree(), kWarps);
    BarrierInit(cta.PeerDsSent(), 1);
    for (int i = 0; i < Shape::kStages; ++i) {
      BarrierInit(cta.PeerQFree(i), 1);
      BarrierInit(cta.PeerGradsFree(i), 1);
    }
  }
}

template <typename T, typename Shape, bool kPlain>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    AttentionBackwardKv(const __grid_constant__ typename Shape::Params p,
                        const __grid_constant__ BackwardMaps maps) {
  extern __shared__ __align__(1024) char shared[];
  const BackwardCta<Shape> cta{p, maps, shared,
                               static_cast<uint32_t>(__cvta_generic_to_shared(shared))};
  const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread / 32, 0);

  constexpr BackwardRegisters kRegisters =
      kPlain ? Shape::kPlainRegisters : Shape::kGeneralRegisters;
  const bool has_dq = p.dq_accum != nullptr, turns = has_dq && p.dq_turns != nullptr;

  // Whose keys these are. For a dq that is the same every time the last tiles come first
  // (dq_turns.cuh), of lists those with the longest walks.
  GridPlace place;
  if constexpr (Shape::kListed && kPlain) {
    place = LongestFirst<Shape::kClusterKeys, Shape::kThreads>(
        p, blockIdx.x / Shape::kCluster, *reinterpret_cast<RankedTiles*>(cta.Bytes(cta.Ds(0))));
  } else {
    place = FirstTilesFirst(p, blockIdx.x / Shape::kCluster, turns);
  }
  const int member = place.pair / p.kv_heads;
  const int kv_head = p.first_kv_head + place.pair - member * p.kv_heads;
  Sequence found;
  int first_key;
  if (!FindTile<Along::kKeys, Shape::kClusterKeys>(p, member, place.tile, &found, &first_key)) {
    return;
  }
  if (Shape::kClustered) first_key += ClusterRank() * Shape::kKeys;
  BackwardOwned& owned = cta.owned();
  const BackwardLoader<Shape, kPlain> loader{cta, thread % 32};
  if (thread == 0) {
    owned.sequence = found;
    owned.first_key = first_key;
    owned.kv_head = kv_head;
    // With dQ, threads of two more warps look at each step.
    const int readers = Shape::kSplitsProducts ? (turns ? 2 * 32 : 0) : (has_dq ? 2 : 0);
    InitBarriers(cta, readers);
    FenceBarrierInit();
    loader.LoadKeys();
  }
  const auto meet = [] {
    if constexpr (Shape::kClustered) {
      ClusterMeet();
    } else {
      __syncthreads();
    }
  };
  if (warp == 0) {
    __syncwarp();
    BarrierMeet(kLoaderBegins, 2 * 32);
  }
  if (warp == 1) loader.Begin(found, first_key, kv_head);
  if (warp < kWarpgroup / 32) {
    GiveRegisters<kRegisters.loader>();
    meet();
    if (warp == 0) {
      loader.Run();
    } else if (warp < 3) {
      if constexpr (!Shape::kSplitsProducts) {
        if (has_dq && ElectLane()) BackwardAdder<Shape>{cta, warp - 1, place.nth}.Run();
      } else if (turns) {
        BackwardTurns<Shape>{cta, warp - 1, thread % 32, place.nth}.Run();
      }
    }
  } else {
    TakeRegisters<kRegisters.worker>();
    meet();
    const int group = warp / (kWarpgroup / 32) - 1, worker = thread % kWarpgroup;
    if constexpr (!Shape::kSplitsProducts) {
      using Worker =
          std::conditional_t<Shape::kSequential, SplitKeysSequentialWorker<T, Shape, kPlain>,
                             SplitKeysWorker<T, Shape, kPlain>>;
      Worker{{cta, group, worker}}.Run();
    } else {
      const auto run = [&](auto number) {
        constexpr int kGroup = decltype(number)::value;
        using Worker = std::conditional_t<Shape::kClustered,
                                          SplitProductsClusterWorker<T, Shape, kPlain, kGroup>,
                                          SplitProductsWorker<T, Shape, kPlain, kGroup>>;
        RunGroup<kGroup>(Worker{{cta, kGroup, worker}});
      };
      if (group == 0) {
        run(std::integral_constant<int, 0>{});
      } else {
        run(std::integral_constant<int, 1>{});
      }
    }
  }
  if constexpr (Shape::kClustered) ClusterMeet();  // the other CTA still writes here, and arrives
}

}  // namespace kvblock::hopper
