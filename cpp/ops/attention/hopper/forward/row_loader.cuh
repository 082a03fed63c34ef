// The loader of Hopper's forward kernel (kernel.cuh) where keys lie in small blocks of a cache:
// whole warps copy rows of K and V to where bulk copies would put them.
//
// Each warp has its own rows of every tile. A lane looks up one or two of them, a tile ahead: their
// blocks' ids are on the way while the tile before is loaded. Then eight lanes copy 128 bytes of a
// row, and are told by the lane that has looked it up where it lies. A row that no query of the
// tile sees, or that is in no block, becomes zeros; those that would be seen are written down as
// holes. Of a row a thread keeps how far it is from where layer and head begin: 32 bits.
//
// `full` counts every thread's copies, by themselves when they are done, and each warp, which has
// written its holes.
#pragma once

#include <cstdint>

#include "device/cp_async.cuh"
#include "device/mbarrier.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "ops/attention/hopper/forward/page_loader.cuh"
#include "ops/attention/hopper/forward/shared.cuh"

namespace kvblock::hopper {

template <typename Traits>
class RowLoader : public PageLoader<Traits, RowLoader<Traits>> {
 public:
  using Base = PageLoader<Traits, RowLoader>;
  using typename Base::Item;
  using typename Base::Params;

  __device__ __forceinline__ RowLoader(const Params& p, const CUtensorMap& queries,
                                       ForwardShared<Traits>& shared, int warp)
      : Base(p, queries, shared, warp), layer_(FindLayer(p, 0)) {}

 private:
  friend Base;
  using Base::keys_, Base::lane_, Base::p_, Base::shared_, Base::values_, Base::warp_;

  static constexpr int kOwn = Traits::kWarpKeys, kWords = Traits::kWarpWords;
  static constexpr uint32_t kNowhere = UINT32_MAX;

  struct Found {
    PagedKey keys[kWords];
  };

  // The layer of a member's call.
  __device__ __forceinline__ PagedLayer LayerOf(int member) const {
    return p_.layer_batch > 1 ? FindLayer(p_, static_cast<int>(p_.by_sequences(member))) : layer_;
  }

  // This lane's keys of a tile that begins at `first`.
  __device__ __forceinline__ int Key(int first, int i) const {
    return first + warp_ * kOwn + i * 32 + lane_;
  }
  __device__ __forceinline__ bool IsSeen(const Item& item, int first, int i) const {
    const int key = Key(first, i);
    const bool own = kOwn % 32 == 0 || i * 32 + lane_ < kOwn;
    return own && key >= item.key_begin && key < item.key_end;
  }

  // Waits for a step, and asks for the ids of its blocks.
  __device__ __forceinline__ Found LookUpStep(const StageCount<kSteps>& at) const {
    BarrierWait(SharedAddress(&shared_.step_full[at.stage]), at.phase);
    const Step& step = shared_.steps[at.stage];
    const Item& item = shared_.items[step.item];
    Found found;
    const bool some = item.is == Item::kTiles && LayerOf(item.sequence.batch).there;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      found.keys[i] = {-1, 0};
      if (some && IsSeen(item, step.first, i)) {
        found.keys[i] = FindKey(p_, item.sequence.batch, Key(step.first, i));
      }
    }
    return found;
  }

  // Where the rows of this lane's keys lie.
  __device__ __forceinline__ void FindRows(const PageStrides& strides, const Found& found,
                                           uint32_t (&rows)[kWords]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      rows[i] = HasBlock(p_, found.keys[i]) ? PageRow(strides, found.keys[i]) : kNowhere;
    }
  }

  __device__ __forceinline__ const char* HeadOf(const char* layer, const PageStrides& strides,
                                                const Item& item) const {
    return layer +
           static_cast<uint64_t>(strides.head * static_cast<uint32_t>(item.kv_head)) * p_.unit;
  }

  __device__ __forceinline__ void LoadKeys(const Item& item, int first, const Found& found,
                                           int step) {
    uint32_t rows[kWords];
    FindRows(p_.k_strides, found, rows);
    BarrierWait(SharedAddress(&shared_.k_empty[keys_.stage]), keys_.phase ^ 1);
    Copy<Traits::kQueryChunks>(HeadOf(LayerOf(item.sequence.batch).k, p_.k_strides, item), rows,
                               shared_.k[keys_.stage], p_.head_dim);
    BarrierArriveAfterCopies(SharedAddress(&shared_.k_full[keys_.stage]));
    bool some = false;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const bool hole = IsSeen(item, first, i) && rows[i] == kNowhere;
      const uint32_t holes = __ballot_sync(~0u, hole);
      some = some || holes != 0;
      if (lane_ == 0) shared_.paged.holes[keys_.stage][warp_][i] = holes;
    }
    if (lane_ == 0) {
      if (some) atomicOr(&shared_.steps[step].flags, Step::kHoles | Step::kMasked);
      BarrierArrive(SharedAddress(&shared_.k_full[keys_.stage]));
    }
    __syncwarp();
    keys_.Advance();
  }

  // V of this tile follows K of the next one.
  __device__ __forceinline__ void Settle(const Item& item, const Found& found) {
    FindRows(p_.v_strides, found, value_rows_);
    values_from_ = HeadOf(LayerOf(item.sequence.batch).v, p_.v_strides, item);
    pending_ = true;
  }
  __device__ __forceinline__ void LoadValues() {
    if (!pending_) return;
    const uint32_t full = SharedAddress(&shared_.v_full[values_.stage]);
    BarrierWait(SharedAddress(&shared_.v_empty[values_.stage]), values_.phase ^ 1);
    Copy<Traits::kValueChunks>(values_from_, value_rows_, shared_.v[values_.stage], p_.value_dim);
    BarrierArriveAfterCopies(full);
    if (lane_ == 0) BarrierArrive(full);
    values_.Advance();
    pending_ = false;
  }

  // This warp's rows of a tile. Four rows at a time, eight lanes each.
  template <int kChunks>
  __device__ __forceinline__ void Copy(const char* from, const uint32_t (&rows)[kWords], char* to,
                                       int columns) const {
    const int row = lane_ / 8, column = lane_ % 8 * 8;
    const char* const own = from + column * 2;
    // Rows r and r + 4 of eight lie differently.
    const uint32_t tile = SharedAddress(to) + warp_ * kOwn * kChunkRowBytes;
    const uint32_t places[2] = {tile + SwizzledOffset(Traits::kKeys, row, column),
                                tile + SwizzledOffset(Traits::kKeys, row + 4, column)};
#pragma unroll
    for (int r = 0; r < kOwn; r += 4) {
      const uint32_t units = __shfl_sync(~0u, rows[r / 32], r % 32 + row);
      const char* const row_from = own + static_cast<uint64_t>(units) * p_.unit;
      const uint32_t place = places[r / 4 % 2] + r / 8 * 8 * kChunkRowBytes;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const bool there = units != kNowhere && c * kChunkColumns + column < columns;
        CopyAsync16(place + c * Traits::kKeys * kChunkRowBytes, row_from + c * kChunkRowBytes,
                    there);
      }
    }
  }

  const PagedLayer layer_;  // of the first call
  uint32_t value_rows_[kWords];
  const char* values_from_;
  bool pending_ = false;
};

}  // namespace kvblock::hopper
