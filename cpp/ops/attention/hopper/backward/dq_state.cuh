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
// have any order: there who stores has its part in hand when it says so (adder.cuh), and waits for
// nobody. Where lists go with a softcap or a bias, and where the workers themselves add and should
// not wait, dq_accum is cleared, and there is no dq_state.
//
// Why every addition comes after the store, by the memory consistency model of PTX. Both are bulk
// copies, of the async proxy, weak (the store) and relaxed.gpu (each addition), so their order has
// to come from elsewhere.
//
//   1. The first waits until its store is complete (cp.async.bulk.wait_group, not .read, which
//      tells no more than that shared memory has been read). A completion is followed by a fence
//      between the async and the generic proxy: the store is visible to this thread.
//   2. It raises the counter by red.release.gpu; the others see that by ld.acquire.gpu or
//      atom.acquire.gpu. A release and the acquire that reads from it synchronize, so the store
//      precedes what they do next, by the generic proxy.
//   3. Their additions are of the async proxy again, but of other thread blocks. For them a fence
//      between the proxies has to follow the acquire: fence.proxy.async.global.
//
// Additions to one place need no order among each other: each is relaxed.gpu by itself. With turns
// they have the order of 1 to 3, the counter being dq_turns. Whoever reads the sums is another
// launch, which the end of this one precedes for all proxies, once each thread that adds has waited
// for its additions to complete.
#pragma once

#include <cstdint>

#include "device/reduce_add.cuh"
#include "device/tensor_copy.cuh"
#include "ops/attention/hopper/backward/dq_tile.cuh"

namespace kvblock::hopper {

__device__ __forceinline__ int32_t* DqState(const AttentionParams& p, const Sequence& s, int head,
                                            int query) {
  return p.dq_state + DqTileNumber(p, s, head, query) * kDqCounters;
}

// One thread: true when it is the one to store, else waits until that is done, and may add.
__device__ __forceinline__ bool ComesFirst(int32_t* state) {
  int seen = CompareAndSwap(state, 0, 1);
  if (seen == 0) return true;
  while (seen != 2) seen = LoadAcquire(state);
  FenceAsyncGlobal();
  return false;
}

// One thread: whether a tile has been stored; then it may add.
__device__ __forceinline__ bool IsStored(const int32_t* state) {
  if (LoadAcquire(state) != 2) return false;
  FenceAsyncGlobal();
  return true;
}

}  // namespace kvblock::hopper
