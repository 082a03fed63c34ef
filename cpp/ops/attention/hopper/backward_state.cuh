// Who comes first to a tile of dq_accum, which is not cleared: the first stores what others add to.
//
// dq_state has two counters for each tile of 64 queries, zero at the launch; the second is for the
// other half of the columns where two warps add one each. A counter is 0 before anybody
// has come, 1 while the first stores, and 2 once that is done, for which others wait. With turns,
// the first is known; then it is 0 or 1. A tall tile has the counters of the 64 queries that it
// ends in.
//
// Who waits may hold up a store of its own, of a tile that comes later in its walk. All CTAs walk
// over the tiles in the same order, so the store of the first such tile waits for nobody. Lists may
// have any order: for them, and where the workers themselves add and should not wait, dq_accum is
// cleared, and there is no dq_state.
#pragma once

#include <cstdint>

#include "device/reduce_add.cuh"
#include "ops/attention/hopper/dq_tile.cuh"

namespace kvblock::hopper {

constexpr int kDqCounters = KVBLOCK_ATTENTION_DQ_COUNTERS;

__device__ __forceinline__ int32_t* DqState(const AttentionParams& p, const Sequence& s, int head,
                                            int query) {
  return p.dq_state + DqTileNumber(p, s, head, query) * kDqCounters;
}

// One thread: true when it is the one to store, else waits until that is done. The copy engine's
// stores and additions take place in L2, so one that begins later comes later.
__device__ __forceinline__ bool ComesFirst(int32_t* state) {
  int seen = CompareAndSwap(state, 0, 1);
  if (seen == 0) return true;
  while (seen != 2) seen = LoadAcquire(state);
  return false;
}

}  // namespace kvblock::hopper
