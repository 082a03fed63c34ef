// The writer of Hopper's forward kernel (kernel.cuh), a warp: O from shared to global memory, while
// the consumers go on; of joined calls also what they are joined with, before.
#pragma once

#include <cstdint>

#include "device/mbarrier.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "ops/attention/hopper/forward/result.cuh"
#include "ops/attention/hopper/forward/shared.cuh"

namespace kvblock::hopper {

template <typename Traits>
class Writer {
 public:
  using Params = typename Traits::Params;
  using Item = typename Traits::Item;

  __device__ __forceinline__ Writer(const Params& p, const CUtensorMap& map,
                                    ForwardShared<Traits>& shared)
      : p_(p), map_(map), shared_(shared), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void Run() {
    StageCount<1> outputs;
    StageCount<kItems> items;
    for (;; items.Advance(), outputs.Advance()) {
      const Item& item = shared_.items[items.stage];
      if constexpr (Traits::kJoins) {
        BarrierWait(SharedAddress(&shared_.joined.item_full[items.stage]), items.phase);
        if (item.is == Item::kEnd) return;
#pragma unroll 1
        for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) Fill(item, consumer);
      }
#pragma unroll 1
      for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
        BarrierWait(SharedAddress(&shared_.o_full[consumer]), outputs.phase);
        if (item.is == Item::kEnd) return;
        if (Writes(item, consumer)) Store(item, consumer);
        if (!Traits::kJoins) BarrierArrive(SharedAddress(&shared_.o_empty[consumer]));
      }
    }
  }

 private:
  __device__ __forceinline__ bool Writes(const Item& item, int consumer) const {
    if constexpr (Traits::kSharesKeys) return shared_.paged.writes[consumer];
    return !Traits::kJoins || item.is == Item::kTiles;
  }
  __device__ __forceinline__ void Store(const Item& item, int consumer) {
    const int row = consumer * kConsumerRows, rows = RowsOf(item) - row;
    if (IsBox(rows)) {
      if (lane_ == 0) StoreTile(item, consumer);
    } else {
      MoveRows(item, shared_.o[consumer], row, min(rows, kConsumerRows), kStores);
    }
    __syncwarp();  // all lanes have read it
  }

  // Brings what a consumer's rows hold to its place. Items without tiles stay as they are.
  __device__ __forceinline__ void Fill(const Item& item, int consumer) {
    const uint32_t full = SharedAddress(&shared_.o_empty[consumer]);
    const int row = consumer * kConsumerRows, rows = RowsOf(item) - row;
    bool arrives = true;
    if (item.is == Item::kTiles) {
      const float* const lse = p_.lse + item.sequence.LseRow(p_, item.head) + item.first;
#pragma unroll
      for (int i = lane_; i < kConsumerRows; i += 32) {
        shared_.joined.lse[consumer][i] = i < rows ? lse[row + i] : 0.0f;
      }
      if (IsBox(rows)) {
        arrives = lane_ != 0;
        if (lane_ == 0) FillTile(item, consumer, full);
      } else {
        MoveRows(item, shared_.o[consumer], row, min(rows, kConsumerRows), kFills);
      }
    }
    if (arrives) BarrierArrive(full);
  }
  __device__ __forceinline__ void FillTile(const Item& item, int consumer, uint32_t full) {
    const uint32_t to = SharedAddress(shared_.o[consumer]);
    BarrierExpect(full, Traits::kOBytes);
#pragma unroll
    for (int c = 0; c < Traits::kOutputChunks; ++c) {
      LoadBox(to + c * kConsumerRows * kChunkRowBytes, map_, full, c * kChunkColumns, item.head,
              MapRow(item, consumer * kConsumerRows), item.batch);
    }
  }

  __device__ __forceinline__ static int RowsOf(const Item& item) {
    if constexpr (Traits::kPaged) return item.rows;
    return item.sequence.q_rows - item.first;
  }
  // Whether a consumer's rows, of which so many are the sequence's, can leave as a box.
  __device__ __forceinline__ bool IsBox(int rows) const {
    if constexpr (Traits::kPaged) {
      return rows >= kConsumerRows && kConsumerRows % p_.by_pack.d == 0;  // of whole queries
    } else {
      return p_.cu_q == nullptr || rows >= kConsumerRows;
    }
  }
  // The row of the tensor map that a row of the tile is in.
  __device__ __forceinline__ int MapRow(const Item& item, int row) const {
    if constexpr (Traits::kPaged) return item.q_row + static_cast<int>(p_.by_pack(row));
    return item.q_row + row;
  }
  __device__ __forceinline__ void StoreTile(const Item& item, int consumer) {
    const uint32_t from = SharedAddress(shared_.o[consumer]);
#pragma unroll
    for (int c = 0; c < Traits::kOutputChunks; ++c) {
      StoreBox(map_, from + c * kConsumerRows * kChunkRowBytes, c * kChunkColumns, item.head,
               MapRow(item, consumer * kConsumerRows), item.batch);
    }
    CommitStores();
    WaitStoresRead<0>();
  }

  // The first rows of a tile, there or back: what follows them belongs to the next packed sequence.
  enum Way { kStores, kFills };
  __device__ __forceinline__ void MoveRows(const Item& item, char* place, int row, int rows,
                                           Way way) {
    constexpr int kPiece = 8, kPieces = Traits::kOutputChunks * kChunkColumns / kPiece;
    uint16_t* const o = static_cast<uint16_t*>(p_.o);
#pragma unroll 1
    for (int i = lane_; i < rows * kPieces; i += 32) {
      const int own = i / kPieces, column = i % kPieces * kPiece;
      if (column >= p_.value_dim) continue;
      int head = item.head;
      if constexpr (Traits::kPaged) head = PlaceOf<Traits>(p_, item, row + own).head;
      const int64_t at = static_cast<int64_t>(MapRow(item, row + own)) * p_.num_heads + head;
      uint4* const outside = reinterpret_cast<uint4*>(o + at * p_.value_dim + column);
      uint4* const inside =
          reinterpret_cast<uint4*>(place + SwizzledOffset(kConsumerRows, own, column));
      if (way == kStores) {
        *outside = *inside;
      } else {
        *inside = *outside;
      }
    }
  }

  const Params& p_;
  const CUtensorMap& map_;
  ForwardShared<Traits>& shared_;
  const int lane_;
};

}  // namespace kvblock::hopper
