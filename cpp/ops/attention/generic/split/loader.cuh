// Warps of a CTA that only load (kernel.cuh), and how they and those who compute hand tiles on.
//
// They find a tile's place in the line, look up where its rows lie while the tile before is copied,
// and copy as soon as the stage is empty. Nobody who computes waits for any of that: only for the
// tile.
//
//   full    every thread that loads arrives twice: for what it has written, and by itself once its
//           copies are done
//   empty   every thread that computes arrives once it is done with the stage, and with all else
//           that is told of the tile
#pragma once

#include <cstdint>

#include "device/cp_async.cuh"
#include "device/mbarrier.cuh"
#include "ops/attention/schedule/shares.cuh"
#include "ops/attention/schedule/stage_count.cuh"

namespace kvblock::generic {

// Where somebody is on the way through the stages.
template <typename Traits>
class StageWalk {
 public:
  // One thread, before all meet.
  __device__ __forceinline__ static void MakeBarriers() {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      BarrierInit(Full() + stage * 8, Traits::kLoaders * 32 * 2);
      BarrierInit(Empty() + stage * 8, Traits::kComputing);
    }
  }

  __device__ __forceinline__ int stage() const { return at_.stage; }

  // Who loads: before, and after.
  __device__ __forceinline__ void AwaitEmpty() const {
    BarrierWait(Empty() + at_.stage * 8, at_.phase ^ 1);
  }
  __device__ __forceinline__ void Loaded() {
    BarrierArriveAfterCopies(Full() + at_.stage * 8);
    BarrierArrive(Full() + at_.stage * 8);
    at_.Advance();
  }
  // Who computes.
  __device__ __forceinline__ void AwaitFull() const {
    BarrierWait(Full() + at_.stage * 8, at_.phase);
  }
  __device__ __forceinline__ void Leave() {
    BarrierArrive(Empty() + at_.stage * 8);
    at_.Advance();
  }

 private:
  static constexpr int kStages = Traits::kStages;
  static __device__ __forceinline__ uint32_t Full() { return Address(0); }
  static __device__ __forceinline__ uint32_t Empty() { return Address(kStages); }
  static __device__ __forceinline__ uint32_t Address(int barrier) {
    __shared__ uint64_t barriers[2 * kStages];
    return static_cast<uint32_t>(__cvta_generic_to_shared(barriers + barrier));
  }

  StageCount<kStages> at_;
};

// The tiles of a share, from `ahead` on, to the stages at `shared`. All warps that load. Who
// computes finds the place of tile i at i % kPlaces, but for the first, which it knows.
template <typename Traits, typename Line, int kPlaces>
__device__ __forceinline__ void LoadShare(const Line& line, typename Traits::Keys& keys,
                                          Place ahead, int tiles, uint32_t shared,
                                          Place (&places)[kPlaces], StageWalk<Traits>& walk) {
  typename Traits::Keys::Found found{};
  // One copy of the code, as kernel.cuh has it: the first round only looks up.
#pragma unroll 1
  for (int tile = -1; tile < tiles; ++tile) {
    const bool whole = tile >= 0 && keys.Settle(found, tile);
    const int member = found.member, kv_head = found.kv_head;
    if (tile + 1 < tiles) found = keys.LookUp(ahead);
    if (tile < 0) keys.PrepareToLoad();
    if (tile >= 0) {
      walk.AwaitEmpty();
      __syncwarp();  // all have settled their rows
      const uint32_t k_tile = shared + walk.stage() * Traits::kStageBytes;
      keys.Load(member, kv_head, tile, k_tile, k_tile + Traits::KvTile::kBytes, whole);
      walk.Loaded();
      // Tile + 1 - kPlaces has left its stage.
      if (tile + 1 < tiles && threadIdx.x == 0) places[(tile + 1) % kPlaces] = ahead;
    }
    if (tile + 2 < tiles) line.Next(&ahead);
  }
  CopyAsyncCommit();
  CopyAsyncWait<0>();
}

}  // namespace kvblock::generic
