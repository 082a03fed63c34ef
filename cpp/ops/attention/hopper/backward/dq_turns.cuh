// Turns in adding to dq_accum, for a dq that is the same every time.
//
// The tiles of keys that see a tile of queries add to it one after the other, the last keys first.
// dq_turns counts for each 64 queries how many warpgroups have added. Two warps of the loader's
// warpgroup, one for each that computes, wait for its turn while it still computes, and hand the
// turn on when the additions are done. Those that add themselves (adder.cuh) do it on the
// way; here are the others.
//
// A CTA never waits for one that has not begun: with turns the last keys have the first CTAs. Under
// a causal mask nobody waits at all then: keys that are 128 further on have begun 128 queries
// further on.
#pragma once

#include <cstdint>

#include "device/mbarrier.cuh"
#include "device/reduce_add.cuh"
#include "ops/attention/hopper/backward/dq_tile.cuh"
#include "ops/attention/hopper/backward/shared.cuh"

namespace kvblock::hopper {

// Which turn at dQ of the step's queries is this CTA's: so many warpgroups add before it.
// launched_before: CTAs (or clusters) of these heads, of which boundaries that fall can promise
// more.
template <typename Shape>
__device__ __forceinline__ int MyTurn(const BackwardOwned& owned, const BackwardStep& at,
                                      int launched_before) {
  // Where a tile has 128 queries, each warpgroup adds to its own 64; else both to the same.
  constexpr int kAdders = (Shape::kQueries == 128 ? 1 : 2) * Shape::kCluster;
  int first_key, end_key;
  owned.sequence.VisibleKeys(at.first, at.first + Shape::kQueries, &first_key, &end_key);
  const int tiles = (end_key - 1) / Shape::kClusterKeys - owned.first_key / Shape::kClusterKeys;
  return min(tiles, launched_before) * kAdders;
}
// One thread waits for it, and hands the turn on.
__device__ __forceinline__ void AwaitDqTurn(const int32_t* turns, int mine) {
  while (LoadAcquire(turns) < mine) {
  }
}
__device__ __forceinline__ void PassDqTurn(int32_t* turns) {
  __threadfence();
  AddRelease(turns, 1);
}

template <typename Shape>
struct BackwardTurns {
  const BackwardCta<Shape> cta;
  const int group, lane;
  const int launched_before;  // CTAs of these heads

  __device__ __forceinline__ void Run() const {
    static_assert(Shape::kQueries == kDqRows);
    for (int step = 0;; ++step) {
      cta.AwaitStep(step);
      const BackwardStep at = cta.StepAt(step);
      if (at.flags & BackwardStep::kEnd) return;
      cta.LeaveStep(step % Shape::kStages);
      int32_t* const turns = DqTurn(cta.p, cta.owned().sequence, at.head, at.first);
      if (lane == 0) {
        AwaitDqTurn(turns, MyTurn<Shape>(cta.owned(), at, launched_before));
        BarrierArrive(cta.MayAdd(group));
      }
      __syncwarp();
      BarrierMeet(kTurnTakersMeet + group, kWarpgroup + 32);
      if (lane == 0) PassDqTurn(turns);
    }
  }
};

}  // namespace kvblock::hopper
