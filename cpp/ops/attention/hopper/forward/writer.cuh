// The writer of Hopper's forward kernel (kernel.cuh), a warp: O from shared to global memory,
// while the consumers go on.
#pragma once

#include <cstdint>

#include "device/mbarrier.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "ops/attention/hopper/forward/rows.cuh"
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
    for (int n = 0;; n = (n + 1) % kItems, outputs.Advance()) {
      const Item& item = shared_.items[n];
#pragma unroll 1
      for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
        BarrierWait(SharedAddress(&shared_.o_full[consumer]), outputs.phase);
        if (item.is == Item::kEnd) return;
        const int row = consumer * kConsumerRows, rows = RowsOf(item) - row;
        if (IsBox(rows)) {
          if (lane_ == 0) StoreTile(item, consumer);
        } else {
          StoreRows(item, shared_.o[consumer], row, min(rows, kConsumerRows));
        }
        BarrierArrive(SharedAddress(&shared_.o_empty[consumer]));
      }
    }
  }

 private:
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
    for (int c = 0; c < Traits::kValueChunks; ++c) {
      StoreBox(map_, from + c * kConsumerRows * kChunkRowBytes, c * kChunkColumns, item.head,
               MapRow(item, consumer * kConsumerRows), item.batch);
    }
    CommitStores();
    WaitStoresRead<0>();
  }

  // The first rows of a tile: what follows them belongs to the next packed sequence.
  __device__ __forceinline__ void StoreRows(const Item& item, const char* from, int row, int rows) {
    constexpr int kPiece = 8, kPieces = Traits::kValueChunks * kChunkColumns / kPiece;
    uint16_t* const o = static_cast<uint16_t*>(p_.o);
#pragma unroll 1
    for (int i = lane_; i < rows * kPieces; i += 32) {
      const int own = i / kPieces, column = i % kPieces * kPiece;
      if (column >= p_.value_dim) continue;
      int head = item.head;
      if constexpr (Traits::kPaged) head = PlaceOf<Traits>(p_, item, row + own).head;
      const int64_t at = static_cast<int64_t>(MapRow(item, row + own)) * p_.num_heads + head;
      *reinterpret_cast<uint4*>(o + at * p_.value_dim + column) =
          *reinterpret_cast<const uint4*>(from + SwizzledOffset(kConsumerRows, own, column));
    }
  }

  const Params& p_;
  const CUtensorMap& map_;
  ForwardShared<Traits>& shared_;
  const int lane_;
};

}  // namespace kvblock::hopper
