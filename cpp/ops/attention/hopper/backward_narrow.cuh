// A warpgroup of the Hopper backward kernel that owns 64 keys and all columns of their dK and dV.
#pragma once

#include <cstdint>

#include "ops/attention/hopper/backward_worker.cuh"

namespace kvblock::hopper {

template <typename T, typename Shape, bool kPlain>
struct NarrowWorker : BackwardWorker<T, Shape, kPlain> {
  using Base = BackwardWorker<T, Shape, kPlain>;
  using Base::Arrive, Base::owned, Base::StepAt;
  using Base::kQueries, Base::kKeys, Base::p, Base::base, Base::group, Base::thread;
  using typename Base::KeyTile, typename Base::QueryTile, typename Base::ScoreTile;
  using typename Base::Step;
  static constexpr int kDim = Shape::kDim, kScores = kQueries / 2, kSums = kDim / 2;
  static_assert(Shape::kValueDim == kDim);

  // Of dQ it computes all columns of its half of the queries, or 64 columns.
  static constexpr bool kHalfTheQueries = kQueries == 128;
  static constexpr int kDqColumns = kHalfTheQueries ? kDim : 64, kDqSums = kDqColumns / 2;
  static_assert(kHalfTheQueries || kDim == 128 || kDim == 96);
  static constexpr bool kShortOfRegisters = kQueries == 128;

  // D = K Q^T or V dO^T: 64 keys by kQueries.
  __device__ __forceinline__ void KeysByQueries(float (&d)[kScores], uint32_t keys,
                                                uint32_t queries) const {
    const uint64_t a = SharedOperand(keys + group * 64 * kChunkRowBytes);
    const uint64_t b = SharedOperand(queries);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      Wgmma<kQueries>::template Shared<T>(d, Advance(a, k / 4 * KeyTile::kChunkBytes + k % 4 * 32),
                                          Advance(b, k / 4 * QueryTile::kChunkBytes + k % 4 * 32),
                                          k > 0);
    }
  }

  // D += A B, A [64 keys, kQueries] in registers, B [kQueries, kDim].
  __device__ __forceinline__ void SumOverQueries(float (&d)[kSums], const Packed<kScores>& a,
                                                 uint32_t queries) const {
    const uint64_t b = SharedOperand(queries, QueryTile::kChunkBytes);
#pragma unroll
    for (int k = 0; k < kQueries / 16; ++k) {
      Wgmma<kDim>::template Registers<T, OperandLies::kDown>(d, a[k],
                                                             Advance(b, k * 16 * kChunkRowBytes));
    }
  }

  // This warpgroup's part of dQ = dS K.
  __device__ __forceinline__ void SumOverKeys(float (&d)[kDqSums], uint32_t ds) const {
    const uint64_t a = SharedOperand(ds + (kHalfTheQueries ? group * ScoreTile::kChunkBytes : 0));
    const uint64_t b =
        SharedOperand(base + Shape::kK + (kHalfTheQueries ? 0 : group * KeyTile::kChunkBytes),
                      KeyTile::kChunkBytes);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      Wgmma<kDqColumns>::template Shared<T, OperandLies::kDown, OperandLies::kDown>(
          d, Advance(a, k * 16 * kChunkRowBytes), Advance(b, k * 16 * kChunkRowBytes), k > 0);
    }
  }

  __device__ __forceinline__ uint32_t DsOf(int step) const {
    return base + Shape::kDs + step % 2 * ScoreTile::kBytes;
  }
  __device__ __forceinline__ int DqFirst(const Step& at) const {
    return at.first + (kHalfTheQueries ? group * kDqRows : 0);
  }
  __device__ __forceinline__ bool HasDq(const Step& at) const {
    return !kHalfTheQueries || DqFirst(at) < owned().sequence.q_len;
  }

  // Adds the dQ of a step.
  __device__ __forceinline__ void Add(const float (&dq)[kDqSums], int step) const {
    const Step& at = StepAt(step);
    Base::AwaitTurn(step);
    const int first_block = kHalfTheQueries ? 0 : group * 8;
    if (HasDq(at)) Base::AddDq(dq, at.head, DqFirst(at), first_block);
    Base::PassTurn();
  }

  __device__ __forceinline__ void Run() const {
    constexpr int kStages = Shape::kStages;
    const bool has_dq = p.dq_accum != nullptr;
    float dk[kSums], dv[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) dk[i] = dv[i] = 0.0f;

    int step = 0;
    for (;; ++step) {
      const int stage = step % kStages, phase = step / kStages % 2;
      const uint32_t q = base + Shape::kQ + stage * QueryTile::kBytes;
      const uint32_t d_o = base + Shape::kDo + stage * QueryTile::kBytes;
      BarrierWait(base + Shape::kQFull + stage * 8, phase);
      const Step& at = StepAt(step);
      const int flags = at.flags;
      if (flags & Step::kEnd) break;
      if (step == 0) Base::TakeKeys();
      if (flags & Step::kPartial) Base::ClearStrangers(at.first, stage, phase);

      // S and dP.
      float c[kScores], dp[kScores];
      WgmmaFence();
      KeysByQueries(c, base + Shape::kK, q);
      WgmmaCommit();
      if constexpr (kShortOfRegisters) WgmmaWait<1>();  // the operand of the dK before is free
      BarrierWait(base + Shape::kDoFull + stage * 8, phase);
      KeysByQueries(dp, base + Shape::kV, d_o);
      WgmmaCommit();

      // P, under dP; dV.
      WgmmaWait<1>();
      KeepAfter(c);
      if (step > 0) BarrierArrive(base + Shape::kQFree + (step - 1) % kStages * 8);
      const BackwardScores<T, kScores, kPlain> scores{
          p, owned().sequence, owned().first_key + group * 64, at.first, at.head, thread};
      Packed<kScores> prob, ds;
      scores.Probabilities(prob, c, Base::LseOf(stage), flags & Step::kMasked);
      WgmmaFence();
      SumOverQueries(dv, prob, d_o);
      WgmmaCommit();

      // dS, under dV.
      WgmmaWait<1>();
      KeepAfter(dp);
      scores.Slopes(c, dp, Base::DeltaOf(stage), flags & Step::kMasked);
      PackAll<T>(ds, c);
      if (has_dq) {
        // Both have written the dS before, and have read the one before that.
        if (step > 0) BarrierWait(base + Shape::kScoresReady, (step - 1) % 2);
        StorePacked<ScoreTile>(DsOf(step), group * 64, 0, thread, ds);
        FenceAsync();
      }

      // dQ of the step before and dK. (The first step's dQ is of nothing, and dropped.)
      float dq[kDqSums];
      WgmmaFence();
      SumOverKeys(dq, DsOf(step + 1));
      WgmmaCommit();
      SumOverQueries(dk, ds, q);
      WgmmaCommit();
      WgmmaWait<1>();
      KeepAfter(dq);
      Arrive(base + Shape::kDoFree + stage * 8);
      if (has_dq) {
        Arrive(base + Shape::kScoresReady);
        if (step > 0) Add(dq, step - 1);
      }
    }

    WgmmaWait<0>();
    KeepAfter(dk);
    KeepAfter(dv);
    if (has_dq && step > 0) {
      float dq[kDqSums];
      BarrierWait(base + Shape::kScoresReady, (step - 1) % 2);
      WgmmaFence();
      SumOverKeys(dq, DsOf(step - 1));
      WgmmaCommit();
      WgmmaWait<0>();
      KeepAfter(dq);
      Add(dq, step - 1);
    }

    BarrierMeet(kWorkersMeet, Shape::kWorkers);  // nobody reads K any more
    StoreAccumulators<T, KeyTile>(base + Shape::kK, group * 64, 0, thread, dk, p.scale);
    StoreAccumulators<T, KeyTile>(base + Shape::kV, group * 64, 0, thread, dv, 1.0f);
    BarrierMeet(kWorkersMeet, Shape::kWorkers);
    Base::StoreKeys();
  }
};

}  // namespace kvblock::hopper
