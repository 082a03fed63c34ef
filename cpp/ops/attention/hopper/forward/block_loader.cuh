// The loader of Hopper's forward kernel (kernel.cuh) where keys lie in blocks of a cache that are
// multiples of 8 keys: a few warps start bulk copies of parts of blocks, `box_rows` rows each.
//
// A lane looks up the block of one box of a tile. The lanes of a warp start their copies one after
// the other, which takes a while where blocks are small, so all warps look all boxes up, and take
// turns in starting copies: a chunk of a box is one. A box that no query of the tile sees, or whose
// block there is not, comes as zeros from beyond the last block; the keys of one that would be seen
// are written down as holes. Rows of others that come along in a box are masked, and their V is
// cleared, by the consumers.
#pragma once

#include <cstdint>

#include "device/mbarrier.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "ops/attention/hopper/forward/page_loader.cuh"
#include "ops/attention/hopper/forward/shared.cuh"

namespace kvblock::hopper {

template <typename Traits>
class BlockLoader : public PageLoader<Traits, BlockLoader<Traits>> {
 public:
  using Base = PageLoader<Traits, BlockLoader>;
  using typename Base::Item;
  using typename Base::Params;

  __device__ __forceinline__ BlockLoader(const Params& p, const ForwardMaps& maps,
                                         ForwardShared<Traits>& shared, int warp)
      : Base(p, maps, shared, warp), boxes_(Traits::kKeys / p.box_rows) {}

 private:
  friend Base;
  using Base::keys_, Base::lane_, Base::maps_, Base::p_, Base::shared_, Base::values_;
  using Base::warp_;
  using typename Base::Found;

  static constexpr int kLookups = 1;
  __device__ __forceinline__ int RowOf(int) const {
    return lane_ < boxes_ ? lane_ * p_.box_rows : Base::kNoRow;
  }
  __device__ __forceinline__ int Rows() const { return p_.box_rows; }

  __device__ __forceinline__ void Begin(const Item& item) {
    head_ = item.kv_head;
    layer_ = LayerNumber(p_, this->LayerIndex(item));
  }
  // Its coordinates; those of a block that there is not lie beyond the last one.
  __device__ __forceinline__ PagedKey Settled(const Found& box) const {
    return HasBlock(p_, box.at[0]) ? box.at[0] : PagedKey{static_cast<int>(p_.num_blocks), 0};
  }

  __device__ __forceinline__ void LoadKeys(const Found& box, int step) {
    BarrierWait(SharedAddress(&shared_.k_empty[keys_.stage]), keys_.phase ^ 1);
    const uint32_t holes = this->Holes(box, 0);
    if (holes != 0 && warp_ == 0) WriteHoles(holes, step);
    Copy<Traits::kQueryChunks>(maps_.k, shared_.k[keys_.stage], &shared_.k_full[keys_.stage],
                               Settled(box), head_, layer_);
    keys_.Advance();
  }
  __device__ __forceinline__ void Settle(const Found& box) {
    pending_ = {Settled(box), head_, layer_, true};
  }
  __device__ __forceinline__ void LoadValues() {
    if (!pending_.any) return;
    BarrierWait(SharedAddress(&shared_.v_empty[values_.stage]), values_.phase ^ 1);
    Copy<Traits::kValueChunks>(maps_.v, shared_.v[values_.stage], &shared_.v_full[values_.stage],
                               pending_.at, pending_.head, pending_.layer);
    values_.Advance();
    pending_.any = false;
  }

  // A bit for each key of the boxes in `holes`. Lane 0 writes them, which tells that they are
  // there.
  __device__ __forceinline__ void WriteHoles(uint32_t holes, int step) {
#pragma unroll 1
    for (int warp = 0; warp < Traits::kLoadWarps; ++warp) {
#pragma unroll 1
      for (int word = 0; word < Traits::kLaneRows; ++word) {
        const int row = min(LoadedRow<Traits>(warp, lane_, word), Traits::kKeys - 1);
        const uint32_t bits = __ballot_sync(~0u, holes >> (row / p_.box_rows) & 1);
        if (lane_ == 0) shared_.paged.holes[step][warp][word] = bits;
      }
    }
    if (lane_ == 0) atomicOr(&shared_.steps[step].flags, Step::kHoles | Step::kMasked);
  }

  // This warp's copies of a tile of K or V: each lane those of its box.
  template <int kChunks>
  __device__ __forceinline__ void Copy(const CUtensorMap& map, char* to, uint64_t* full,
                                       const PagedKey& at, int head, int layer) {
    constexpr int kWarps = Traits::kLoadWarps;
    const uint32_t barrier = SharedAddress(full);
    const int box_bytes = p_.box_rows * kChunkRowBytes;
    const int copies = (boxes_ * kChunks + kWarps - 1 - warp_) / kWarps;
    if (lane_ == 0) BarrierExpect(barrier, copies * box_bytes);
    __syncwarp();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (lane_ < boxes_ && (lane_ * kChunks + c) % kWarps == warp_) {
        const uint32_t place = SharedAddress(to) + lane_ * box_bytes;
        LoadBox(place + c * Traits::kKeys * kChunkRowBytes, map, barrier,
                {c * kChunkColumns, head, at.slot, at.block, layer});
      }
    }
    __syncwarp();
  }

  const int boxes_;
  int head_ = 0, layer_ = 0;
  struct {
    PagedKey at;
    int head, layer;
    bool any;
  } pending_ = {};  // the tile whose V is to be loaded
};

}  // namespace kvblock::hopper
