// How both loaders of keys in blocks (block_loader.cuh, row_loader.cuh) follow the planner's steps:
// two warps, each its part of every tile.
//
//   look up tile 0 | look up 1, K0 Q | look up 2, K1 V0 | ...
//
// A loader has LookUpStep, which asks for the ids of a tile's blocks; LoadKeys; Settle, which keeps
// where V of the tile lies until K of the next one is on its way; and LoadValues.
#pragma once

#include "device/mbarrier.cuh"
#include "ops/attention/hopper/forward/packed_queries.cuh"
#include "ops/attention/hopper/forward/shared.cuh"

namespace kvblock::hopper {

template <typename Traits, typename Loader>
class PageLoader {
 public:
  using Params = typename Traits::Params;
  using Item = typename Traits::Item;

  __device__ __forceinline__ void Run() {
    Loader& loader = static_cast<Loader&>(*this);
    StageCount<kSteps> ahead, now;
    auto found = loader.LookUpStep(ahead);
    int item_before = -1;
    for (;; now.Advance()) {
      const Step& step = shared_.steps[now.stage];
      const Item& item = shared_.items[step.item];
      if (item.is == Item::kEnd) {
        loader.LoadValues();
        LoadQueries(item);
        return;
      }
      ahead.Advance();
      const auto after = loader.LookUpStep(ahead);
      if (item.is != Item::kTiles) {
        loader.LoadValues();
        __syncwarp();  // all have read the step, which is free once the consumers know of the item
        LoadQueries(item);
      } else {
        const bool starts = step.item != item_before;  // the other warp may be adding to the flags
        item_before = step.item;
        loader.LoadKeys(item, step.first, found, now.stage);
        // With one place for Q, the consumers need the last V to be done with it.
        if (starts && Traits::kQueryStages > 1) LoadQueries(item);
        loader.LoadValues();
        if (starts && Traits::kQueryStages == 1) LoadQueries(item);
        loader.Settle(item, found);
      }
      found = after;
    }
  }

 protected:
  __device__ __forceinline__ PageLoader(const Params& p, const CUtensorMap& queries,
                                        ForwardShared<Traits>& shared, int warp)
      : p_(p), queries_map_(queries), shared_(shared), warp_(warp), lane_(threadIdx.x % 32) {}

  const Params& p_;
  const CUtensorMap& queries_map_;
  ForwardShared<Traits>& shared_;
  const int warp_, lane_;
  StageCount<Traits::kStages> keys_, values_;

 private:
  // Tells the consumers of the item, and loads its Q where there is anything to compute. Both warps
  // tell them, or one that is late would miss items that have no keys.
  __device__ __forceinline__ void LoadQueries(const Item& item) {
    if (lane_ == 0) {
      BarrierWait(SharedAddress(&shared_.q_empty[queries_.stage]), queries_.phase ^ 1);
      if (warp_ == 0 && item.is == Item::kTiles) {
        LoadPackedQueries<Traits>(p_, queries_map_, shared_, queries_.stage, item);
      } else {
        BarrierArrive(SharedAddress(&shared_.q_full[queries_.stage]));
      }
    }
    __syncwarp();
    queries_.Advance();
  }

  StageCount<Traits::kQueryStages> queries_;
};

}  // namespace kvblock::hopper
