// What warpgroups do alike that own 64 keys each (split_keys.cuh, split_keys_sequential.cuh).
#pragma once

#include <cstdint>

#include "ops/attention/hopper/backward/worker.cuh"

namespace kvblock::hopper {

// This warpgroup's rows of K or V.
template <typename Worker>
__device__ __forceinline__ uint32_t OwnRows(const Worker& w, uint32_t tile) {
  return tile + w.group * 64 * kChunkRowBytes;
}

// Waits for dO. In a partial tile rows of Q and dO that take no part become zeros, because dK and
// dV sum over them.
template <typename Worker>
__device__ __forceinline__ void ClearQueries(const Worker& w, int first, int stage, int phase) {
  constexpr int kWorkers = Worker::kWorkers;
  w.cta.AwaitGrads(stage, phase);
  const int rows = w.sequence().q_len - first, worker = w.Number();
  ZeroRows<typename Worker::QueryTile>(w.cta.QBytes(stage), rows, worker, kWorkers);
  ZeroRows<typename Worker::GradTile>(w.cta.GradsBytes(stage), rows, worker, kWorkers);
  FenceAsync();
  BarrierMeet(kWorkersMeet, kWorkers);
}

constexpr int kDqBlockBytes = kDqRows * 8 * 4;  // of 64 queries by 8 columns
// Writes this thread's part of block n of 8 columns of dQ.
template <int kCount>
__device__ __forceinline__ void WriteBlock(char* to, const float (&dq)[kCount], int n) {
  *reinterpret_cast<float4*>(to) =
      make_float4(dq[n * 4], dq[n * 4 + 1], dq[n * 4 + 2], dq[n * 4 + 3]);
}

// One thread: this warpgroup's rows of dK or dV, which lie where those of K or V were, go out.
template <typename Tile, typename Worker>
__device__ __forceinline__ void StoreBoxes(const Worker& w, const CUtensorMap& map, uint32_t tile) {
  const Sequence& s = w.sequence();
  const bool packed = w.p().cu_q != nullptr;
  const int mine = w.group * kStoredRows, first = w.cta.owned().first_key + mine;
  const int row = packed ? static_cast<int>(s.kv_row) + first : first;
#pragma unroll
  for (int c = 0; c < Tile::kChunks; ++c) {
    StoreBox(map, tile + c * Tile::kChunkBytes + mine * kChunkRowBytes, c * kChunkColumns,
             w.cta.owned().kv_head, row, packed ? 0 : s.batch);
  }
  CommitStores();
}
// This warpgroup's rows of dK or dV go to where those of K or V were, and out if boxes may.
template <typename Tile, typename Worker>
__device__ __forceinline__ void StoreOwnRows(const Worker& w, bool boxes, const CUtensorMap& map,
                                             uint32_t tile, const float (&sums)[Tile::kDim / 2],
                                             float scale) {
  StoreAccumulators<typename Worker::T, Tile>(tile, w.group * 64, 0, w.thread, sums, scale);
  FenceAsync();
  BarrierMeet(kWarpgroupMeets + w.group, kWarpgroup);
  if (boxes && w.thread == 0) StoreBoxes<Tile>(w, map, tile);
}
// dV and dK go out by way of this warpgroup's rows of V and K. Packed, the rows after the last of a
// sequence are another's, which boxes would overwrite.
template <typename Worker>
__device__ __forceinline__ void StoreSums(const Worker& w,
                                          const float (&dk)[Worker::KeyTile::kDim / 2],
                                          const float (&dv)[Worker::ValueTile::kDim / 2]) {
  using KeyTile = typename Worker::KeyTile;
  using ValueTile = typename Worker::ValueTile;
  const bool boxes =
      w.p().cu_q == nullptr || w.cta.owned().first_key + Worker::kKeys <= w.sequence().kv_rows;
  if constexpr (Worker::Shape::kDrops) {
    StoreOwnRows<ValueTile>(w, boxes, w.cta.maps.dv, w.cta.V(), dv, w.ValueScale());
  } else {
    StoreOwnRows<ValueTile>(w, boxes, w.cta.maps.dv, w.cta.V(), dv, 1.0f);
  }
  BarrierMeet(kWorkersMeet, Worker::kWorkers);  // nobody reads K any more
  if constexpr (Worker::Shape::kDrops) {
    StoreOwnRows<KeyTile>(w, boxes, w.cta.maps.dk, w.cta.K(), dk, w.KeyScale());
  } else {
    StoreOwnRows<KeyTile>(w, boxes, w.cta.maps.dk, w.cta.K(), dk, w.p().scale);
  }
  if (boxes) {
    if (w.thread == 0) WaitStoresRead<0>();
  } else {
    BarrierMeet(kWorkersMeet, Worker::kWorkers);
    w.StoreKeys();
  }
}

}  // namespace kvblock::hopper
