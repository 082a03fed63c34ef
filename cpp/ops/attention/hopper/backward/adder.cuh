// A warp of the Hopper backward kernel that adds one warpgroup's dQ to dq_accum.
//
// The warpgroup leaves its part, 64 queries by at most 64 columns (sequential 96), in shared memory
// in the order of dq_accum (dq_tile.cuh), where it is one piece: one bulk addition of 16 KB (24).
// Additions from registers keep the load/store unit busy, for which the rest of the kernel then
// waits. Of a tall tile it is up to 20 KB: blocks of queries past its end are left out. Who
// comes first to a tile stores it instead (dq_state.cuh). Lists may name tiles in any order; there
// it asks who that is when its part has come, and if it is the one, it stores at once.
#pragma once

#include <cstdint>

#include "device/mbarrier.cuh"
#include "device/tensor_copy.cuh"
#include "ops/attention/hopper/backward/dq_state.cuh"
#include "ops/attention/hopper/backward/dq_tile.cuh"
#include "ops/attention/hopper/backward/dq_turns.cuh"
#include "ops/attention/hopper/backward/shared.cuh"

namespace kvblock::hopper {

template <typename Shape>
struct BackwardAdder {
  const BackwardCta<Shape> cta;
  const int group;            // the warpgroup's
  const int launched_before;  // CTAs (or clusters) of these heads

  // One thread.
  __device__ __forceinline__ void Run() const {
    constexpr int kDqStages = Shape::kDqStages;
    // Where a tile has 128 queries, each warpgroup has 64 of them; else 64 or 96 of the columns.
    constexpr bool kHalfTheQueries = Shape::kQueries == 128;
    const AttentionParams& p = cta.p;
    const Sequence& s = cta.owned().sequence;
    constexpr int kDqBlocks = Shape::kDqColumns / 8;
    const int first_block = kHalfTheQueries ? 0 : group * kDqBlocks;
    const int blocks = min(p.head_dim / 8 - first_block, kDqBlocks);
    constexpr int kBlock = kDqRows * 8;  // values
    for (int step = 0;; ++step) {
      cta.AwaitStep(step);
      const BackwardStep at = cta.StepAt(step);
      if (at.flags & BackwardStep::kEnd) break;
      cta.LeaveStep(step % Shape::kStages);
      const int first = at.first + (kHalfTheQueries ? group * kDqRows : 0);
      const bool exists = first < s.q_len, in_turn = exists && p.dq_turns != nullptr;
      const bool adds = exists && blocks > 0;
      const int counted = Shape::kTall ? at.end - 1 : first;
      int32_t* const state = DqState(p, s, at.head, counted) + first_block / 8;
      bool stores = false, stored = false;
      if constexpr (Shape::kListed) {
        stored = adds && p.dq_state != nullptr && IsStored(state);
      } else if (in_turn) {
        const int mine = MyTurn<Shape>(cta.owned(), at, launched_before);
        AwaitDqTurn(DqTurn(p, s, at.head, first), mine);
        FenceAsyncGlobal();  // what was added before is done (dq_state.cuh)
        stores = mine == 0;
      } else if (adds && p.dq_state != nullptr) {
        stores = ComesFirst(state);
      }
      const int place = step % kDqStages * 2 + group;
      BarrierWait(cta.DqFull(place), step / kDqStages % 2);
      if constexpr (Shape::kListed) {
        if (adds && p.dq_state != nullptr && !stored) stores = ComesFirst(state);
      }
      const auto add = [&](float* to, int values) {
        const uint32_t from = cta.Dq(place);
        if (stores) {
          StoreBytes(to, from, values * 4);
        } else {
          AddBytes(to, from, values * 4);
        }
        CommitStores();
        WaitStoresRead<0>();
      };
      if constexpr (Shape::kTall) {
        const int tall_blocks = (at.end - first + 7) / 8;
        if (adds) add(DqTallBlock(p, s, at.head, first, group), tall_blocks * kTallBlock);
      } else if (adds) {
        add(DqTile(p, s, at.head, first) + first_block * kBlock, blocks * kBlock);
      }
      BarrierArrive(cta.DqFree(place));
      const bool passes = !Shape::kListed && in_turn;
      if (passes || stores) WaitStores<0>();
      if (stores) AddRelease(state, 1);
      if (passes) PassDqTurn(DqTurn(p, s, at.head, first));
    }
    WaitStores<0>();  // and done for the launch that reads the sums
  }
};

}  // namespace kvblock::hopper
