// Attention over a latent cache on Hopper's warpgroup products (wgmma, sm_90a), for tiles of up to
// 64 packed rows: a value is the first 512 columns of its key, which has 576. What generic/latent
// does with mma.sync; lines, shares, pieces and who combines them are the same.
//
// A CTA is all that a multiprocessor has. It computes one tile of rows at a time, of which Q lies
// in shared memory beside two tiles of 64 keys, 72 KiB each, and has three warpgroups: one that
// loads, and two consumers with half of O's columns each, 128 registers a thread.
//
//   tile        0    1    2    3    ...      of a piece
//   owner       0    1    0    1             who computes S and P of it
//   O += P V    both, by columns, tile after tile
//
// P goes to the other consumer through shared memory, where the tile has its last 64 columns, which
// are not values; so do the numbers that the rows' exponents are relative to. They move when a
// maximum has outgrown them by 2^8 (forward/rows.cuh), in the order of tiles, so that O and sums of
// both follow one after the other, and hardly ever.
//
//   consumer 0                        consumer 1
//   S(2)                              P(1)
//   O += P(1) V(1)                    O += P(1) V(1)
//   P(2), under that product          wait for P(2)
//   O += P(2) V(2)                    O += P(2) V(2)
//   wait for tile 4                   S(3)
//   S(4)                              P(3), under the other's S(4)
//
// So the tensor cores have something to do while one of them computes exponentials, and a tile has
// time to come: what lies in shared memory is left in groups of 64 to 128 columns as soon as both
// its owner and who multiplies it are done, and loaded anew by bulk copies in the same order.
//
// With kCluster 2 a unit is two such tiles of rows, and two CTAs of a cluster compute it, 64 rows
// each: they take the same share of keys side by side. Each loads every other chunk of a tile into
// both, at the same place, so that a key comes from L2 once. A chunk may come when the consumers of
// both have left its group: these arrive in their own CTA and in the other one, each of which waits
// for both before it loads its half, and expects the bytes of both halves. The second CTA of a unit
// with no more than 64 rows computes nothing that is written, and loads and leaves as the other.
//
// Keys that no row of a unit sees but that come along in a box are cleared (ClearUnseen).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/cluster.cuh"
#include "device/mbarrier.cuh"
#include "device/publish.cuh"
#include "device/shared.cuh"
#include "device/tensor_copy.cuh"
#include "device/warpgroup.cuh"
#include "ops/attention/hopper/latent/consumer.cuh"
#include "ops/attention/hopper/latent/loader.cuh"
#include "ops/attention/hopper/latent/shared.cuh"
#include "ops/attention/schedule/ragged.cuh"
#include "ops/attention/schedule/shares.cuh"

namespace kvblock::hopper {

template <typename Traits>
__device__ __forceinline__ void MakeBarriers(LatentShared<Traits>& shared) {
  const auto make = [](uint64_t& barrier, int arrivals) {
    BarrierInit(SharedAddress(&barrier), arrivals);
  };
#pragma unroll 1
  for (int stage = 0; stage < Traits::kStages; ++stage) {
#pragma unroll 1
    for (int group = 0; group < kChunkGroups; ++group) {
      make(shared.full[stage][group], 1);
      make(shared.empty[stage][group], LeavesOf<Traits>(group));
    }
  }
#pragma unroll 1
  for (int piece = 0; piece < kPieces; ++piece) {
    make(shared.piece_full[piece], 1);
    make(shared.piece_empty[piece], Traits::kConsumerThreads);
  }
#pragma unroll
  for (uint64_t& barrier : shared.p_full) make(barrier, kWarpgroup);
  make(shared.both_meet, Traits::kConsumerThreads);
  make(shared.q_full, 1);
  make(shared.q_empty, Traits::kConsumerThreads / 32);
  FenceBarrierInit();
}

// Zeros and -inf.
template <typename Traits>
__device__ __forceinline__ void WriteRowsOfNobody(const typename Traits::Params& p, bool all) {
  ForRowsOfNobody(p, all, threadIdx.x / 32, Traits::kThreads / 32, [&](int64_t row) {
    const int lane = threadIdx.x % 32, vectors = p.num_heads * p.value_dim / 8;
    uint4* const o = static_cast<uint4*>(p.o) + row * vectors;
    for (int i = lane; i < vectors; i += 32) o[i] = uint4{0, 0, 0, 0};
    if (p.lse == nullptr) return;
    for (int h = lane; h < p.num_heads; h += 32) p.lse[row * p.num_heads + h] = -INFINITY;
  });
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    AttentionLatent(const __grid_constant__ typename Traits::Params p,
                    const __grid_constant__ LatentMaps maps) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  auto& shared = DynamicSharedAs<LatentShared<Traits>>();
  if (threadIdx.x == 0) {
    PrefetchTensorMap(maps.q);
    PrefetchTensorMap(maps.k);
    MakeBarriers<Traits>(shared);
    if (p.split == kNoSplit) {  // the next launch sees this before it can begin
      Withdraw(PieceThere<Traits>(p, PieceSlot(NumberOf<Traits>(), true)));
      Withdraw(PieceThere<Traits>(p, PieceSlot(NumberOf<Traits>(), false)));
      __threadfence();
    }
  }
  typename Traits::OwnLine line(p, 0);
  int begin, end;
  Place first{};
  line.FindShare(NumberOf<Traits>(), &begin, &end, &first);
  const bool fallen = line.fallen();
  if constexpr (Traits::kCluster > 1) {
    ClusterMeet();
  } else {
    __syncthreads();
  }
  // The same for all lanes of a warp, which the compiler must see.
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (group == 0) {
    GiveRegisters<Traits::kLoaderRegisters>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
    LatentLoader<Traits>(p, maps, shared, line, warp).Run(begin, end - begin, first);
    WriteRowsOfNobody<Traits>(p, fallen);
  } else {
    TakeRegisters<Traits::kConsumerRegisters>();
    WriteRowsOfNobody<Traits>(p, fallen);
    if (group == 1) {
      LatentConsumer<Traits, 0>(p, shared).Run();
    } else {
      LatentConsumer<Traits, 1>(p, shared).Run();
    }
  }
  // The other CTA still writes here, and arrives.
  if constexpr (Traits::kCluster > 1) ClusterMeet();
#endif
}

}  // namespace kvblock::hopper
