// The writer of Hopper's forward kernel (kernel.cuh), a warp: O from shared to global memory,
// while the consumers go on.
#pragma once

#include <cstdint>

#include "device/mbarrier.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "ops/attention/hopper/forward/shared.cuh"

namespace kvblock::hopper {

template <typename Traits>
class Writer {
 public:
  __device__ __forceinline__ Writer(const AttentionParams& p, const CUtensorMap& map,
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
        const int row = consumer * kConsumerRows, rows = item.sequence.q_rows - item.first - row;
        if (p_.cu_q == nullptr || rows >= kConsumerRows) {
          if (lane_ == 0) StoreTile(item, consumer);
        } else {
          StoreRows(item, shared_.o[consumer], row, rows);
        }
        BarrierArrive(SharedAddress(&shared_.o_empty[consumer]));
      }
    }
  }

 private:
  __device__ __forceinline__ void StoreTile(const Item& item, int consumer) {
    const uint32_t from = SharedAddress(shared_.o[consumer]);
#pragma unroll
    for (int c = 0; c < Traits::kValueChunks; ++c) {
      StoreBox(map_, from + c * kConsumerRows * kChunkRowBytes, c * kChunkColumns, item.head,
               item.q_row + consumer * kConsumerRows, item.batch);
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
      const int64_t at = static_cast<int64_t>(item.q_row + row + own) * p_.num_heads + item.head;
      *reinterpret_cast<uint4*>(o + at * p_.value_dim + column) =
          *reinterpret_cast<const uint4*>(from + SwizzledOffset(kConsumerRows, own, column));
    }
  }

  const AttentionParams& p_;
  const CUtensorMap& map_;
  ForwardShared<Traits>& shared_;
  const int lane_;
};

}  // namespace kvblock::hopper
