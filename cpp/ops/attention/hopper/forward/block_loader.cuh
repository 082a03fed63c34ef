// The loader of Hopper's forward kernel (kernel.cuh) where keys lie in blocks of a cache that are
// multiples of 8 keys: two warps start bulk copies of parts of blocks, `box_rows` rows each.
//
// A lane looks up the block of one box of a tile, a tile ahead. The lanes of a warp start their
// copies one after the other, which takes a while where blocks are small, so both warps look all
// boxes up, and one starts the copies of the even ones, the other those of the odd ones. A box that
// no query of the tile sees, or whose block there is not, comes as zeros from beyond the last
// block; the keys of one that would be seen are written down as holes. Rows of others that come
// along in a box are masked, and their V is cleared, by the consumers.
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
      : Base(p, maps.q, shared, warp),
        maps_(maps),
        boxes_(Traits::kKeys / p.box_rows),
        layer_(LayerNumber(p, 0)) {}

 private:
  friend Base;
  using Base::keys_, Base::lane_, Base::p_, Base::shared_, Base::values_, Base::warp_;

  // This lane's box of a tile: its block and its first row there; whether some query sees it.
  struct Box {
    PagedKey at;
    bool seen;
  };

  __device__ __forceinline__ int LayerOf(int member) const {
    return p_.layer_batch > 1 ? LayerNumber(p_, static_cast<int>(p_.by_sequences(member))) : layer_;
  }

  // Waits for a step, and asks for the ids of its blocks.
  __device__ __forceinline__ Box LookUpStep(const StageCount<kSteps>& at) const {
    BarrierWait(SharedAddress(&shared_.step_full[at.stage]), at.phase);
    const Step& step = shared_.steps[at.stage];
    const Item& item = shared_.items[step.item];
    Box box = {{-1, 0}, false};
    if (item.is != Item::kTiles || lane_ >= boxes_) return box;
    const int key = step.first + lane_ * p_.box_rows;
    box.seen = key < item.key_end && key + p_.box_rows > item.key_begin;
    if (box.seen) box.at = FindKey(p_, item.sequence.batch, key);
    return box;
  }
  // Its coordinates; those of a block that there is not lie beyond the last one.
  __device__ __forceinline__ PagedKey Settled(const Box& box) const {
    return HasBlock(p_, box.at) ? box.at : PagedKey{static_cast<int>(p_.num_blocks), 0};
  }

  __device__ __forceinline__ void LoadKeys(const Item& item, int, const Box& box, int step) {
    const int layer = LayerOf(item.sequence.batch);
    const bool there = layer >= 0 && layer < p_.num_layers;
    BarrierWait(SharedAddress(&shared_.k_empty[keys_.stage]), keys_.phase ^ 1);
    const unsigned holes = __ballot_sync(~0u, box.seen && !(there && HasBlock(p_, box.at)));
    if (holes != 0 && warp_ == 0) WriteHoles(holes, step);
    Copy<Traits::kQueryChunks>(maps_.k, shared_.k[keys_.stage], &shared_.k_full[keys_.stage],
                               Settled(box), item.kv_head, layer);
    keys_.Advance();
  }
  __device__ __forceinline__ void Settle(const Item& item, const Box& box) {
    pending_ = {Settled(box), item.kv_head, LayerOf(item.sequence.batch), true};
  }
  __device__ __forceinline__ void LoadValues() {
    if (!pending_.any) return;
    BarrierWait(SharedAddress(&shared_.v_empty[values_.stage]), values_.phase ^ 1);
    Copy<Traits::kValueChunks>(maps_.v, shared_.v[values_.stage], &shared_.v_full[values_.stage],
                               pending_.at, pending_.head, pending_.layer);
    values_.Advance();
    pending_.any = false;
  }

  // A bit for each key of the boxes in `holes`.
  __device__ __forceinline__ void WriteHoles(unsigned holes, int step) {
    if (lane_ < Traits::kLoadWarps * Traits::kWarpWords) {
      const int warp = lane_ / Traits::kWarpWords, word = lane_ % Traits::kWarpWords;
      uint32_t bits = 0;
#pragma unroll 1
      for (int i = 0; i < 32; ++i) {
        const int key = warp * Traits::kWarpKeys + min(word * 32 + i, Traits::kWarpKeys - 1);
        bits |= (holes >> (key / p_.box_rows) & 1) << i;
      }
      shared_.paged.holes[keys_.stage][warp][word] = bits;
    }
    __syncwarp();
    if (lane_ == 0) atomicOr(&shared_.steps[step].flags, Step::kHoles | Step::kMasked);
  }

  // This warp's boxes of a tile of K or V: each lane its own.
  template <int kChunks>
  __device__ __forceinline__ void Copy(const CUtensorMap& map, char* to, uint64_t* full,
                                       const PagedKey& at, int head, int layer) {
    const uint32_t barrier = SharedAddress(full);
    const int rows = (boxes_ + 1 - warp_) / 2 * p_.box_rows;
    if (lane_ == 0) BarrierExpect(barrier, kChunks * rows * kChunkRowBytes);
    __syncwarp();
    if (lane_ < boxes_ && lane_ % 2 == warp_) {
      const uint32_t place = SharedAddress(to) + lane_ * p_.box_rows * kChunkRowBytes;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        LoadBox(place + c * Traits::kKeys * kChunkRowBytes, map, barrier,
                {c * kChunkColumns, head, at.slot, at.block, layer});
      }
    }
    __syncwarp();
  }

  const ForwardMaps& maps_;
  const int boxes_, layer_;  // the layer of the first call
  struct {
    PagedKey at;
    int head, layer;
    bool any;
  } pending_ = {};  // the tile whose V is to be loaded
};

}  // namespace kvblock::hopper
