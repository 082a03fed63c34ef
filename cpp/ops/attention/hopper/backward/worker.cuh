// What all kinds of warpgroups that compute ({narrow,uneven,wide,pair}.cuh) do alike.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/mbarrier.cuh"
#include "device/reduce_add.cuh"
#include "device/tensor_copy.cuh"
#include "device/warpgroup.cuh"
#include "device/wgmma.cuh"
#include "ops/attention/contract/head_rows.cuh"
#include "ops/attention/hopper/backward/dq_tile.cuh"
#include "ops/attention/hopper/backward/scores.cuh"
#include "ops/attention/hopper/backward/shape.cuh"

namespace kvblock::hopper {

template <typename T, typename Shape, bool kPlain>
struct BackwardWorker {
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  using QueryTile = typename Shape::QueryTile;
  using GradTile = typename Shape::GradTile;
  using ScoreTile = typename Shape::ScoreTile;
  using Step = BackwardStep;
  static constexpr int kQueries = Shape::kQueries, kKeys = Shape::kKeys, kWorkers = Shape::kWorkers;

  const AttentionParams& p;
  const BackwardMaps& maps;
  char* const shared;
  const uint32_t base;
  const int group, thread;  // which warpgroup of the two, and its thread

  __device__ __forceinline__ const BackwardOwned& owned() const {
    return *reinterpret_cast<const BackwardOwned*>(shared + Shape::kOwned);
  }
  __device__ __forceinline__ const Step& StepAt(int step) const {
    return reinterpret_cast<const Step*>(shared + Shape::kSteps)[step % Shape::kHeldSteps];
  }
  __device__ __forceinline__ const float* LseOf(int stage) const {
    return reinterpret_cast<const float*>(shared + Shape::kLse) + stage * kQueries;
  }
  __device__ __forceinline__ const float* DeltaOf(int stage) const {
    return reinterpret_cast<const float*>(shared + Shape::kDelta) + stage * kQueries;
  }
  // For the warp, where copies and products alone follow (BarrierArrive).
  __device__ __forceinline__ void Arrive(uint32_t barrier) const {
    __syncwarp();
    if (thread % 32 == 0) BarrierArrive(barrier);
  }

  // Waits for K and V. Rows of K that take no part become zeros, because dQ sums over them.
  __device__ __forceinline__ void TakeKeys() const {
    BarrierWait(base + Shape::kKFull, 0);
    BarrierWait(base + Shape::kVFull, 0);
    const Sequence& s = owned().sequence;
    const int rows = s.kv_len - owned().first_key;
    if (rows < kKeys && (p.cu_q != nullptr || s.kv_len < s.kv_rows)) {
      ZeroRows<KeyTile>(shared + Shape::kK, rows, group * kWarpgroup + thread, Shape::kWorkers);
      FenceAsync();
      BarrierMeet(kWorkersMeet, Shape::kWorkers);
    }
  }
  // The same for Q and dO, over whose rows dK and dV sum, in a tile that is partial.
  __device__ __forceinline__ void ClearStrangers(int first, int stage, int phase) const {
    BarrierWait(base + Shape::kDoFull + stage * 8, phase);
    const int rows = owned().sequence.q_len - first, worker = group * kWarpgroup + thread;
    ZeroRows<QueryTile>(shared + Shape::kQ + stage * QueryTile::kBytes, rows, worker,
                        Shape::kWorkers);
    ZeroRows<GradTile>(shared + Shape::kDo + stage * GradTile::kBytes, rows, worker,
                       Shape::kWorkers);
    FenceAsync();
    BarrierMeet(kWorkersMeet, Shape::kWorkers);
  }

  // Where this warpgroup has 64 keys of its own: its rows of K or V.
  __device__ __forceinline__ uint32_t OwnRows(int tile) const {
    return base + tile + group * 64 * kChunkRowBytes;
  }
  // D = K Q^T or V dO^T: 64 keys, of which `keys` has the first row, by queries.
  template <typename A, typename B, int kCount>
  __device__ __forceinline__ void KeysByQueries(float (&d)[kCount], uint32_t keys,
                                                uint32_t queries) const {
    const uint64_t a = SharedOperand(keys), b = SharedOperand(queries);
#pragma unroll
    for (int k = 0; k < A::kDim / 16; ++k) {
      const int chunk = std::is_same_v<A, KeyTile> ? Shape::KeyChunk(k / 4) : k / 4;
      Wgmma<kCount * 2>::template Shared<T>(d, Advance(a, chunk * A::kChunkBytes + k % 4 * 32),
                                            Advance(b, k / 4 * B::kChunkBytes + k % 4 * 32), k > 0);
    }
  }
  // The same, the keys in registers.
  template <typename B, int kCount>
  __device__ __forceinline__ void KeysByQueries(float (&d)[kCount], const Packed<B::kDim / 2>& keys,
                                                uint32_t queries) const {
    const uint64_t b = SharedOperand(queries);
#pragma unroll
    for (int k = 0; k < B::kDim / 16; ++k) {
      Wgmma<kCount * 2>::template Registers<T>(
          d, keys[k], Advance(b, k / 4 * B::kChunkBytes + k % 4 * 32), k > 0);
    }
  }
  // D += A B: A is P or dS of 64 keys, in registers, B dO or Q.
  template <typename B>
  __device__ __forceinline__ void SumOverQueries(float (&d)[B::kDim / 2],
                                                 const Packed<kQueries / 2>& a,
                                                 uint32_t queries) const {
    const uint64_t b = SharedOperand(queries, B::kChunkBytes);
#pragma unroll
    for (int k = 0; k < kQueries / 16; ++k) {
      Wgmma<B::kDim>::template Registers<T, OperandLies::kDown>(
          d, a[k], Advance(b, k * 16 * kChunkRowBytes));
    }
  }

  // Adds this warpgroup's blocks of 8 columns of dQ, from first_block on, for the 64 queries from
  // `first` on.
  template <int kCount>
  __device__ __forceinline__ void AddDq(const float (&dq)[kCount], int head, int first,
                                        int first_block) const {
    float* const to =
        DqTile(p, owned().sequence, head, first) + first_block * (kDqRows * 8) + thread * 4;
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
      if ((first_block + n) * 8 < p.head_dim) {
        ReduceAdd(to + n * (kDqRows * 8), dq[n * 4], dq[n * 4 + 1], dq[n * 4 + 2], dq[n * 4 + 3]);
      }
    }
  }
  // With turns (dq_turns.cuh): waits for this warpgroup's, and hands it on.
  __device__ __forceinline__ void AwaitTurn(int step) const {
    if (p.dq_turns != nullptr) BarrierWait(base + Shape::kMayAdd + group * 8, step % 2);
  }
  __device__ __forceinline__ void PassTurn() const {
    if (p.dq_turns != nullptr) BarrierPass(kTurnTakersMeet + group, kWarpgroup + 32);
  }

  // One thread: this warpgroup's rows of dK or dV, which lie where those of K or V were, go out.
  template <typename Tile>
  __device__ __forceinline__ void StoreRows(const CUtensorMap& map, uint32_t tile) const {
    const Sequence& s = owned().sequence;
    const bool packed = p.cu_q != nullptr;
    const int mine = group * kStoredRows, first = owned().first_key + mine;
    const int row = packed ? static_cast<int>(s.kv_row) + first : first;
#pragma unroll
    for (int c = 0; c < Tile::kChunks; ++c) {
      StoreBox(map, tile + c * Tile::kChunkBytes + mine * kChunkRowBytes, c * kChunkColumns,
               owned().kv_head, row, packed ? 0 : s.batch);
    }
    CommitStores();
  }

  // All rows of both, by all threads.
  __device__ __forceinline__ void StoreKeys() const {
    const int worker = group * kWarpgroup + thread;
    const Sequence& s = owned().sequence;
    const int first_key = owned().first_key, kv_head = owned().kv_head;
    StoreTile<KeyTile, Shape::kWorkers>(
        shared + Shape::kK, RowsOfHead<T>(p.dk, s.kv_row, p.num_kv_heads, kv_head, p.head_dim),
        first_key, s.kv_rows, worker);
    StoreTile<ValueTile, Shape::kWorkers>(
        shared + Shape::kV, RowsOfHead<T>(p.dv, s.kv_row, p.num_kv_heads, kv_head, p.value_dim),
        first_key, s.kv_rows, worker);
  }
};

}  // namespace kvblock::hopper
