// The loader of Hopper's forward kernel (kernel.cuh) where keys lie in small blocks of a cache:
// whole warps copy rows of K and V to where bulk copies would put them.
//
// The warps take turns at four rows each, eight lanes a row. All rows of a warp lie alike in their
// swizzle: a lane has one place in shared memory, and all others are constants away. A lane looks
// up one row for one turn, and tells eight where it lies: how far it is from where layer and head
// begin, 32 bits. So four rows of 256 bytes take a shuffle, a sum and two copies.
//
// A row that no query of the tile sees, or that is in no block, becomes zeros; those that would be
// seen are written down as holes. Nearly all tiles have neither, and their copies ask nothing.
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

  __device__ __forceinline__ RowLoader(const Params& p, const ForwardMaps& maps,
                                       ForwardShared<Traits>& shared, int warp)
      : Base(p, maps, shared, warp) {}

 private:
  friend Base;
  using Base::keys_, Base::lane_, Base::p_, Base::shared_, Base::values_, Base::warp_;
  using typename Base::Found;

  static constexpr int kLookups = Traits::kLaneRows;
  static constexpr uint32_t kNowhere = UINT32_MAX;
  using Places = uint32_t[kLookups];  // of rows, in units

  __device__ __forceinline__ bool IsOwn(int i) const { return i * 8 + lane_ % 8 < Traits::kTurns; }
  __device__ __forceinline__ int RowOf(int i) const {
    return IsOwn(i) ? LoadedRow<Traits>(warp_, lane_, i) : Base::kNoRow;
  }
  __device__ __forceinline__ int Rows() const { return 1; }

  // Where this lane's rows lie.
  __device__ __forceinline__ void FindRows(const PageStrides& strides, const Found& found,
                                           Places& rows) const {
#pragma unroll
    for (int i = 0; i < kLookups; ++i) {
      rows[i] = HasBlock(p_, found.at[i]) ? PageRow(strides, found.at[i]) : kNowhere;
    }
  }

  // What this lane copies of the row that lies where layer and head begin.
  __device__ __forceinline__ const char* PieceOf(const char* layer, const PageStrides& strides,
                                                 const Item& item) const {
    const uint32_t head = strides.head * static_cast<uint32_t>(item.kv_head);
    return StepFrom(layer + lane_ % 8 * 16, head, p_.unit);
  }
  __device__ __forceinline__ void Begin(const Item& item) {
    const PagedLayer layer = FindLayer(p_, this->LayerIndex(item));
    keys_from_ = PieceOf(layer.k, p_.k_strides, item);
    values_from_ = PieceOf(layer.v, p_.v_strides, item);
  }

  __device__ __forceinline__ void LoadKeys(const Found& found, int step) {
    const uint32_t full = SharedAddress(&shared_.k_full[keys_.stage]);
    Places rows;
    FindRows(p_.k_strides, found, rows);
    BarrierWait(SharedAddress(&shared_.k_empty[keys_.stage]), keys_.phase ^ 1);
    // Of 8 bits two columns count as one.
    const int columns = Traits::kNarrow ? p_.head_dim / 2 : p_.head_dim;
    Copy<Traits::kQueryChunks>(keys_from_, rows, shared_.k[keys_.stage], columns);
    BarrierArriveAfterCopies(full);
    bool some = false;
#pragma unroll
    for (int i = 0; i < kLookups; ++i) {
      const uint32_t holes = this->Holes(found, i);
      some = some || holes != 0;
      // Also where there are none: another warp may have some.
      if (lane_ == 0) shared_.paged.holes[step][warp_][i] = holes;
    }
    if (lane_ == 0) {
      if (some) atomicOr(&shared_.steps[step].flags, Step::kHoles | Step::kMasked);
      BarrierArrive(full);
    }
    __syncwarp();
    keys_.Advance();
  }

  // V of this tile follows K of the next one.
  __device__ __forceinline__ void Settle(const Found& found) {
    FindRows(p_.v_strides, found, value_rows_);
    pending_from_ = values_from_;
    pending_ = true;
  }
  __device__ __forceinline__ void LoadValues() {
    if (!pending_) return;
    const uint32_t full = SharedAddress(&shared_.v_full[values_.stage]);
    BarrierWait(SharedAddress(&shared_.v_empty[values_.stage]), values_.phase ^ 1);
    Copy<Traits::kValueChunks>(pending_from_, value_rows_, shared_.v[values_.stage], p_.value_dim);
    BarrierArriveAfterCopies(full);
    if (lane_ == 0) BarrierArrive(full);
    __syncwarp();
    values_.Advance();
    pending_ = false;
  }

  // This warp's rows of a tile.
  template <int kChunks>
  __device__ __forceinline__ void Copy(const char* from, const Places& rows, char* to,
                                       int columns) const {
    constexpr int kTurns = Traits::kTurns;
    const int column = lane_ % 8 * 8;
    const uint32_t place =
        SharedAddress(to) + SwizzledOffset(Traits::kKeys, warp_ * 4 + lane_ / 8, column);
    const auto copy = [&](int turn, const char* row_from, bool there) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const uint32_t chunk = place + turn * Traits::kTurnKeys * kChunkRowBytes;
        CopyAsync16(chunk + c * Traits::kKeys * kChunkRowBytes, row_from + c * kChunkRowBytes,
                    there && c * kChunkColumns + column < columns);
      }
    };
    bool all = true;
#pragma unroll
    for (int i = 0; i < kLookups; ++i) all = all && (rows[i] != kNowhere || !IsOwn(i));
    if (__all_sync(~0u, all)) {
      // So many at a time that none waits for the one before.
      constexpr int kTogether = 4;
#pragma unroll
      for (int first = 0; first < kTurns; first += kTogether) {
        const char* rows_from[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether && first + i < kTurns; ++i) {
          const int turn = first + i;
          const uint32_t units = __shfl_sync(~0u, rows[turn / 8], turn % 8, 8);
          rows_from[i] = StepFrom(from, units, p_.unit);
        }
#pragma unroll
        for (int i = 0; i < kTogether && first + i < kTurns; ++i) {
          copy(first + i, rows_from[i], true);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kLookups; ++i) {
#pragma unroll 1
        for (int turn = i * 8; turn < min(i * 8 + 8, kTurns); ++turn) {
          const uint32_t units = __shfl_sync(~0u, rows[i], turn % 8, 8);
          copy(turn, StepFrom(from, units, p_.unit), units != kNowhere);
        }
      }
    }
  }

  const char *keys_from_ = nullptr, *values_from_ = nullptr;  // of this item
  // The tile whose V is to be loaded.
  Places value_rows_;
  const char* pending_from_ = nullptr;
  bool pending_ = false;
};

}  // namespace kvblock::hopper
