// What all warpgroups that compute (split_*.cuh) have and do alike.
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
#include "ops/attention/hopper/backward/shared.cuh"

namespace kvblock::hopper {

// An operand in shared memory, in steps of 16 of the dimension that is summed over.
template <typename Tile, OperandLies kLies_>
struct TileOperand {
  static constexpr OperandLies kLies = kLies_;
  uint64_t first;  // SharedOperand

  __device__ __forceinline__ uint64_t operator[](int k) const {
    return Advance(first, kLies == OperandLies::kAcross ? k / 4 * Tile::kChunkBytes + k % 4 * 32
                                                        : k * 16 * kChunkRowBytes);
  }
};
template <typename Tile>
using Across = TileOperand<Tile, OperandLies::kAcross>;
template <typename Tile>
using Down = TileOperand<Tile, OperandLies::kDown>;

// D = A B over kSteps steps, or D += A B.
template <typename T, int kSteps, typename A, typename B, int kCount>
__device__ __forceinline__ void Multiply(float (&d)[kCount], const A& a, const B& b,
                                         bool accumulate = false) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    Wgmma<kCount * 2>::template Shared<T, A::kLies, B::kLies>(d, a[k], b[k], accumulate || k > 0);
  }
}
// The same, A in registers.
template <typename T, typename B, int kCount, int kSteps>
__device__ __forceinline__ void MultiplyHeld(float (&d)[kCount], const uint32_t (&a)[kSteps][4],
                                             const B& b, bool accumulate = false) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    Wgmma<kCount * 2>::template Registers<T, B::kLies>(d, a[k], b[k], accumulate || k > 0);
  }
}

template <int kCount>
__device__ __forceinline__ void ClearSums(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) d[i] = 0.0f;
}

template <typename T_, typename Shape_, bool kPlain_>
struct BackwardWorker {
  using T = T_;
  using Shape = Shape_;
  using Step = BackwardStep;
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  using PeerKeyTile = typename Shape::PeerKeyTile;
  using QueryTile = typename Shape::QueryTile;
  using GradTile = typename Shape::GradTile;
  using ScoreTile = typename Shape::ScoreTile;
  static constexpr bool kPlain = kPlain_;
  static constexpr int kQueries = Shape::kQueries, kKeys = Shape::kKeys, kWorkers = Shape::kWorkers;
  static constexpr int kStages = Shape::kStages;

  const BackwardCta<Shape> cta;
  const int group, thread;  // which warpgroup of the two, and its thread

  __device__ __forceinline__ const typename Shape::Params& p() const { return cta.p; }
  __device__ __forceinline__ const Sequence& sequence() const { return cta.owned().sequence; }
  // For the warp, where copies and products alone follow (BarrierArrive).
  __device__ __forceinline__ void Arrive(uint32_t barrier) const {
    __syncwarp();
    if (thread % 32 == 0) BarrierArrive(barrier);
  }
  __device__ __forceinline__ void LeaveGrads(int stage) const { Arrive(cta.GradsFree(stage)); }

  // Among both warpgroups.
  __device__ __forceinline__ int Number() const { return group * kWarpgroup + thread; }

  // Waits for a step. Its flags.
  __device__ __forceinline__ int AwaitFlags(int step) const {
    cta.AwaitStep(step);
    return cta.StepAt(step).flags;
  }
  // Those of the step after it.
  __device__ __forceinline__ int AwaitNextFlags(int step) const {
    BarrierWait(cta.QFull((step + 1) % kStages), (step + 1) / kStages % 2);
    return cta.StepAt(step + 1).flags;
  }
  // The same, with the first one for K and V, too. False: there is none.
  __device__ __forceinline__ bool TakeStep(int step) const {
    if (AwaitFlags(step) & BackwardStep::kEnd) return false;
    if (step == 0) TakeKeys();
    return true;
  }
  // Waits for K and V, and in a cluster for what this CTA has of the other's K. Rows of K that take
  // no part become zeros, because dQ sums over them.
  __device__ __forceinline__ void TakeKeys() const {
    BarrierWait(cta.KFull(), 0);
    BarrierWait(cta.VFull(), 0);
    if constexpr (Shape::kClustered) BarrierWait(cta.PeerKFull(), 0);
    const Sequence& s = sequence();
    if constexpr (Shape::kClustered) {
      const int first = cta.owned().first_key, worker = Number();
      if (s.kv_len < (first | kKeys) + kKeys && (p().cu_q != nullptr || s.kv_len < s.kv_rows)) {
        ZeroRows<KeyTile>(cta.KBytes(), max(s.kv_len - first, 0), worker, kWorkers);
        ZeroRows<PeerKeyTile>(cta.PeerKBytes(), max(s.kv_len - (first ^ kKeys), 0), worker,
                              kWorkers);
        FenceAsync();
        BarrierMeet(kWorkersMeet, kWorkers);
      }
    } else {
      const int rows = s.kv_len - cta.owned().first_key;
      if (rows < kKeys && (p().cu_q != nullptr || s.kv_len < s.kv_rows)) {
        ZeroRows<KeyTile>(cta.KBytes(), rows, Number(), kWorkers);
        FenceAsync();
        BarrierMeet(kWorkersMeet, kWorkers);
      }
    }
  }

  // What is dropped of 64 keys from first_key on and of the queries of a head from first_query on.
  __device__ __forceinline__ auto DropoutOf(int first_key, int first_query, int head) const {
    if constexpr (Shape::kDrops) {
      return TileDropout<T>(p(), sequence().batch, first_key, first_query, head, thread);
    } else {
      return NoDropout();
    }
  }
  // What the sums dK and dV are multiplied by.
  __device__ __forceinline__ float KeyScale() const {
    if constexpr (Shape::kDrops) return p().scale * p().dropout.scale;
    return p().scale;
  }
  __device__ __forceinline__ float ValueScale() const {
    if constexpr (Shape::kDrops) return p().dropout.scale;
    return 1.0f;
  }

  // The scores of kCount * 2 queries from first_query on, and of 64 keys from first_key on.
  template <int kCount>
  __device__ __forceinline__ BackwardScores<T, kCount, kPlain, Shape> Scores(int first_key,
                                                                             int first_query,
                                                                             int head,
                                                                             int flags) const {
    return {p(), sequence(), first_key, first_query, head, thread, flags};
  }

  // D = K Q^T or V dO^T: 64 keys, of which `keys` has the first row, by queries.
  template <typename A, typename B, int kCount>
  __device__ __forceinline__ void KeysByQueries(float (&d)[kCount], uint32_t keys,
                                                uint32_t queries) const {
    const uint64_t a = SharedOperand(keys);
    const Across<B> b{SharedOperand(queries)};
#pragma unroll
    for (int k = 0; k < A::kDim / 16; ++k) {
      const int chunk = std::is_same_v<A, KeyTile> ? Shape::KeyChunk(k / 4) : k / 4;
      Wgmma<kCount * 2>::template Shared<T>(d, Advance(a, chunk * A::kChunkBytes + k % 4 * 32),
                                            b[k], k > 0);
    }
  }
  // D += A B: A is P or dS of 64 keys, in registers, B dO or Q.
  template <typename B>
  __device__ __forceinline__ void SumOverQueries(float (&d)[B::kDim / 2],
                                                 const Packed<kQueries / 2>& a,
                                                 uint32_t queries) const {
    MultiplyHeld<T>(d, a, Down<B>{SharedOperand(queries, B::kChunkBytes)}, true);
  }

  // All rows of dK and dV that exist, which lie where those of K and V were, go out; by all
  // threads.
  __device__ __forceinline__ void StoreKeys() const {
    const int worker = Number();
    const Sequence& s = sequence();
    const int first_key = cta.owned().first_key, kv_head = cta.owned().kv_head;
    StoreTile<KeyTile, kWorkers>(
        cta.KBytes(), RowsOfHead<T>(p().dk, s.kv_row, p().num_kv_heads, kv_head, p().head_dim),
        first_key, s.kv_rows, worker);
    StoreTile<ValueTile, kWorkers>(
        cta.VBytes(), RowsOfHead<T>(p().dv, s.kv_row, p().num_kv_heads, kv_head, p().value_dim),
        first_key, s.kv_rows, worker);
  }
};

}  // namespace kvblock::hopper
