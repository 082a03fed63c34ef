// How both loaders of keys in blocks (block_loader.cuh, row_loader.cuh) follow the planner's steps:
// a few warps, each its part of every tile.
//
//   look up tile 0 | look up 1, K0 Q | look up 2, K1 V0 | ...
//
// A lane looks up a few keys of a tile, a tile ahead: the ids of their blocks are on the way while
// the tile before is loaded. What is the same for all tiles of an item is found once.
//
// A loader has kLookups, the number of keys; RowOf(i), which row of a tile key i is, or kNoRow, and
// Rows(), how many rows from there on are in its block; Begin, for a new item; LoadKeys; Settle,
// which keeps where V of the tile lies until K of the next one is on its way; and LoadValues. Of 8
// bits V comes from V^T, and neither of these is asked for.
#pragma once

#include "device/mbarrier.cuh"
#include "device/opaque.cuh"
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
    Found found = LookUpStep(ahead);
    int item_before = -1;
    // There is one copy of all that a tile takes: less code is nearer.
    for (;; now.Advance()) {
      const Step& step = shared_.steps[now.stage];
      const int place = step.item;
      const Item& item = shared_.items[place];
      const bool ends = item.is == Item::kEnd, tiles = item.is == Item::kTiles;
      Found after;
      if (!ends) {
        ahead.Advance();
        after = LookUpStep(ahead);
      }
      const bool starts = place != item_before;  // another warp may be adding to the flags
      item_before = place;
      if (tiles) {
        if (starts) loader.Begin(item);
        loader.LoadKeys(found, now.stage);
      }
      // With one place for Q, the consumers need the last V to be done with it.
      const bool early = tiles && Traits::kQueryStages > 1;
      if (starts && early) LoadQueries(item);
      if constexpr (Traits::kNarrow) {
        LoadTransposed();
      } else {
        loader.LoadValues();
      }
      if (starts && !early) LoadQueries(item);
      if (ends) return;
      if constexpr (Traits::kNarrow) {
        transposed_ = {step.first, item.kv_head, item.sequence.batch, tiles};
      }
      BarrierArrive(SharedAddress(&shared_.step_empty[now.stage]));
      if constexpr (!Traits::kNarrow) {
        if (tiles) loader.Settle(found);
      }
      found = after;
    }
  }

 protected:
  static constexpr int kNoRow = 1 << 20;

  // What a lane has looked up for a tile; whether some query sees it.
  struct Found {
    PagedKey at[Loader::kLookups];
    bool seen[Loader::kLookups];
  };

  __device__ __forceinline__ PageLoader(const Params& p, const ForwardMaps& maps,
                                        ForwardShared<Traits>& shared, int warp)
      : p_(p),
        maps_(maps),
        shared_(shared),
        warp_(warp),
        lane_(Opaque(static_cast<int>(threadIdx.x % 32))) {}

  // The lanes of which number i is seen, and in no block.
  __device__ __forceinline__ uint32_t Holes(const Found& found, int i) const {
    return __ballot_sync(~0u, found.seen[i] && !HasBlock(p_, found.at[i]));
  }
  // The call of an item whose layer counts.
  __device__ __forceinline__ int LayerIndex(const Item& item) const {
    return p_.layer_batch > 1 ? static_cast<int>(p_.by_sequences(item.sequence.batch)) : 0;
  }

  const Params& p_;
  const ForwardMaps& maps_;
  ForwardShared<Traits>& shared_;
  const int warp_, lane_;
  StageCount<Traits::kStages> keys_, values_;

 private:
  // Waits for a step, and asks for the ids of its blocks.
  __device__ __forceinline__ Found LookUpStep(const StageCount<kSteps>& at) {
    const Loader& loader = static_cast<const Loader&>(*this);
    BarrierWait(SharedAddress(&shared_.step_full[at.stage]), at.phase);
    const Step& step = shared_.steps[at.stage];
    const int place = step.item, first = step.first;
    if (place != item_) {
      item_ = place;
      const Item& item = shared_.items[place];
      begin_ = end_ = 0;
      if (item.is == Item::kTiles) {
        begin_ = item.key_begin;
        end_ = item.key_end;
        const int layer = LayerNumber(p_, LayerIndex(item));
        table_ = layer >= 0 && layer < p_.num_layers ? FindTable(p_, item.sequence.batch) : nullptr;
      }
    }
    Found found;
#pragma unroll
    for (int i = 0; i < Loader::kLookups; ++i) {
      const int row = loader.RowOf(i), key = first + row;
      found.at[i] = {-1, 0};
      found.seen[i] = row != kNoRow && key < end_ && key + loader.Rows() > begin_;
      if (found.seen[i] && table_ != nullptr) found.at[i] = FindKey(p_, table_, key);
    }
    return found;
  }

  // Of 8 bits V comes transposed, and a thread of all warps loads it: that of the tile before.
  __device__ __forceinline__ void LoadTransposed() {
    if (!transposed_.any) return;
    if (warp_ == 0 && lane_ == 0) {
      const uint32_t full = SharedAddress(&shared_.v_full[values_.stage]);
      BarrierWait(SharedAddress(&shared_.v_empty[values_.stage]), values_.phase ^ 1);
      BarrierExpect(full, (Traits::kValueRows - Traits::kOnes) * kChunkRowBytes);
      LoadBox(SharedAddress(shared_.v[values_.stage]), maps_.v, full, transposed_.first, 0,
              transposed_.head, transposed_.member);
    }
    __syncwarp();
    values_.Advance();
    transposed_.any = false;
  }

  // Tells the consumers of the item, and loads its Q where there is anything to compute. All warps
  // tell them, or one that is late would miss items that have no keys.
  __device__ __forceinline__ void LoadQueries(const Item& item) {
    if (lane_ == 0) {
      BarrierWait(SharedAddress(&shared_.q_empty[queries_.stage]), queries_.phase ^ 1);
      if (warp_ == 0 && item.is == Item::kTiles) {
        LoadPackedQueries<Traits>(p_, maps_.q, shared_, queries_.stage, item);
      } else {
        BarrierArrive(SharedAddress(&shared_.q_full[queries_.stage]));
      }
    }
    __syncwarp();
    queries_.Advance();
  }

  StageCount<Traits::kQueryStages> queries_;
  // Of the item that is looked up: its place; the keys that some query sees; its blocks, if there
  // is its layer.
  int item_ = -1, begin_ = 0, end_ = 0;
  const int32_t* table_ = nullptr;
  struct {
    int first, head, member;
    bool any;
  } transposed_ = {};  // of 8 bits: the tile whose V is to be loaded
};

}  // namespace kvblock::hopper
