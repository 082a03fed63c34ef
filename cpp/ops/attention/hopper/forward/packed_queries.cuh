// Q of Hopper's forward kernel (kernel.cuh) where the rows of a tile are queries of several heads.
#pragma once

#include <cstdint>

#include "device/mbarrier.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "ops/attention/hopper/forward/shared.cuh"

namespace kvblock::hopper {

// Rows of Q's places that no query ever comes to: tiles are whole queries, of any number of heads.
template <typename Traits>
__device__ __forceinline__ void ClearSpareQueries(const typename Traits::Params& p,
                                                  ForwardShared<Traits>& shared) {
  constexpr int kPieces = kChunkRowBytes / 16;
  const int used = p.queries * static_cast<int>(p.by_pack.d), spare = Traits::kQueries - used;
  for (int i = threadIdx.x; i < Traits::kQueryStages * Traits::kQueryChunks * spare * kPieces;
       i += Traits::kThreads) {
    const int chunk = i / (spare * kPieces), piece = i % (spare * kPieces);
    const int row = chunk * Traits::kQueries + used + piece / kPieces;
    reinterpret_cast<uint4*>(shared.q[0])[row * kPieces + piece % kPieces] = uint4{};
  }
  FenceAsync();
}

// The row of the tensor map that an item's Q begins with.
template <typename Traits>
__device__ __forceinline__ int LoadedQueryRow(const typename Traits::Params& p,
                                              const typename Traits::Item& item) {
  if constexpr (Traits::kNarrow) {
    return NarrowRow(p, item.sequence.batch, item.q_row);
  } else {
    return item.q_row;
  }
}

// One thread: an item's Q.
template <typename Traits>
__device__ __forceinline__ void LoadPackedQueries(const typename Traits::Params& p,
                                                  const CUtensorMap& map,
                                                  ForwardShared<Traits>& shared, int stage,
                                                  const typename Traits::Item& item) {
  const uint32_t full = SharedAddress(&shared.q_full[stage]);
  const int rows = p.queries * static_cast<int>(p.by_pack.d);
  BarrierExpect(full, Traits::kQueryChunks * rows * kChunkRowBytes);
#pragma unroll
  for (int c = 0; c < Traits::kQueryChunks; ++c) {
    LoadBox(SharedAddress(shared.q[stage]) + c * Traits::kQueries * kChunkRowBytes, map, full,
            c * kChunkColumns, item.head, LoadedQueryRow<Traits>(p, item), item.batch);
  }
}

}  // namespace kvblock::hopper
