// The warpgroups of the Hopper backward kernel that share the products instead of the keys, for
// head dims of which dK and dV of 64 keys do not fit into the registers of one. (Head dim 256 takes
// parts of this, and does dQ otherwise: pair.cuh.)
//
//   kGroup 0   S, P, dV     of the CTA's 64 keys and the 64 queries of a step
//   kGroup 1   dP, dS, dK
//   both       dQ           a chunk of 64 columns the first, two the second
//
// So P and dS are multiplied straight from the registers in which they were computed. P goes from
// the threads of the first to the same ones of the second, not rounded, and dS to both by way of
// shared memory. The products of a step, and what runs under them:
//
//   kGroup 0             kGroup 1                 the warpgroup
//   dQ (two steps ago)   dQ, a chunk (a step ago)
//   S                    dP                       adds that chunk
//                        dQ, the next             P; dS
//   dV                   dK                       kGroup 1 adds that chunk; the next step begins
//
// The dQ of kGroup 0 is two steps late, so that it need not wait for the dS that comes of its P.
#pragma once

#include <cstdint>

#include "ops/attention/hopper/backward/worker.cuh"

namespace kvblock::hopper {

template <typename T, typename Shape, bool kPlain, int kGroup>
struct WideWorker : BackwardWorker<T, Shape, kPlain> {
  using Base = BackwardWorker<T, Shape, kPlain>;
  using Base::Arrive, Base::owned, Base::StepAt;
  using Base::kQueries, Base::kKeys, Base::p, Base::shared, Base::base, Base::thread;
  using typename Base::GradTile, typename Base::KeyTile, typename Base::QueryTile;
  using typename Base::ScoreTile, typename Base::Step, typename Base::ValueTile;
  static constexpr int kStages = Shape::kStages, kScores = kQueries / 2;

  // This warpgroup's chunks of dQ, one after the other: two at once and the next scores would be
  // too much for the registers.
  static constexpr int kDqFirst = kGroup, kDqChunks = kGroup + 1, kDqSums = kChunkColumns / 2;

  __device__ __forceinline__ uint32_t QOf(int step) const {
    return base + Shape::kQ + step % kStages * QueryTile::kBytes;
  }
  __device__ __forceinline__ uint32_t DoOf(int step) const {
    return base + Shape::kDo + step % kStages * GradTile::kBytes;
  }
  __device__ __forceinline__ uint32_t DsOf(int step) const {
    return base + Shape::kDs + step % 2 * ScoreTile::kBytes;
  }

  // A chunk of this warpgroup's columns of dQ = dS K.
  template <int kChunk>
  __device__ __forceinline__ void SumOverKeys(float (&d)[kDqSums], uint32_t ds) const {
    const uint64_t a = SharedOperand(ds);
    const uint64_t b = SharedOperand(base + Shape::kK + (kDqFirst + kChunk) * KeyTile::kChunkBytes);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      Wgmma<kChunkColumns>::template Shared<T, OperandLies::kDown, OperandLies::kDown>(
          d, Advance(a, k * 16 * kChunkRowBytes), Advance(b, k * 16 * kChunkRowBytes), k > 0);
    }
  }

  // Waits for Q, lse and delta of a step. False: there is none.
  __device__ __forceinline__ bool TakeStep(int step) const {
    BarrierWait(base + Shape::kQFull + step % kStages * 8, step / kStages % 2);
    if (StepAt(step).flags & Step::kEnd) return false;
    if (step == 0) Base::TakeKeys();
    return true;
  }
  __device__ __forceinline__ void AwaitDo(int step) const {
    BarrierWait(base + Shape::kDoFull + step % kStages * 8, step / kStages % 2);
  }
  __device__ __forceinline__ void AwaitDs(int step) const {
    BarrierWait(base + Shape::kScoresReady + step % 2 * 8, step / 2 % 2);
  }
  // Rows that take no part become zeros, because dK or dV sums over them. By kGroup 0 alone: it
  // tells the other one by handing over P.
  template <typename Tile>
  __device__ __forceinline__ void ClearStrangers(uint32_t tile, const Step& at) const {
    if (at.flags & Step::kPartial) {
      ZeroRows<Tile>(shared + (tile - base), owned().sequence.q_len - at.first, thread, kWarpgroup);
      FenceAsync();
      BarrierMeet(kWarpgroupMeets, kWarpgroup);
    }
  }
  __device__ __forceinline__ BackwardScores<T, kScores, kPlain, Shape::kCapped> ScoresOf(
      const Step& at) const {
    return {p, owned().sequence, owned().first_key, at.first, at.head, thread, at.flags};
  }

  // Where this thread of kGroup 0 leaves its part of P for that of kGroup 1, in pieces of four.
  __device__ __forceinline__ float4* Handed() const {
    return reinterpret_cast<float4*>(shared + Shape::kP) + thread;
  }

  // Adds a chunk of a step's dQ.
  template <int kChunk>
  __device__ __forceinline__ void Add(const float (&dq)[kDqSums], int step) const {
    if (p.dq_accum == nullptr) return;
    const Step& at = StepAt(step);
    if (kChunk == 0) Base::AwaitTurn(step);
    Base::AddDq(dq, at.head, at.first, (kDqFirst + kChunk) * 8);
    if (kChunk == kDqChunks - 1) Base::PassTurn();
  }
  // A chunk of a step when nothing is left to run beside.
  template <int kChunk>
  __device__ __forceinline__ void FinishChunk(int step) const {
    float dq[kDqSums];
    WgmmaFence();
    SumOverKeys<kChunk>(dq, DsOf(step));
    WgmmaCommit();
    WgmmaWait<0>();
    KeepAfter(dq);
    Add<kChunk>(dq, step);
  }
  __device__ __forceinline__ void FinishDq(int step) const {
    AwaitDs(step);
    FinishChunk<0>(step);
    if constexpr (kDqChunks == 2) FinishChunk<1>(step);
  }

  // kGroup 0: S, P, dV, and dQ two steps late.
  __device__ __forceinline__ void RunValues() const {
    static_assert(KeyTile::kChunks == 3);
    float dv[ValueTile::kDim / 2];
#pragma unroll
    for (int i = 0; i < ValueTile::kDim / 2; ++i) dv[i] = 0.0f;

    int step = 0;
    for (; TakeStep(step); ++step) {
      const Step& at = StepAt(step);
      const int stage = step % kStages;
      ClearStrangers<QueryTile>(QOf(step), at);
      // (The first two dQ are of nothing, and dropped.)
      if (step > 1) AwaitDs(step - 2);
      float c[kScores], dq[kDqSums];
      WgmmaFence();
      SumOverKeys<0>(dq, DsOf(step));
      WgmmaCommit();
      WgmmaWait<1>();
      if (step > 0) Arrive(base + Shape::kDoFree + (step - 1) % kStages * 8);

      WgmmaFence();
      Base::template KeysByQueries<KeyTile, QueryTile>(c, base + Shape::kK, QOf(step));
      WgmmaCommit();
      WgmmaWait<1>();
      KeepAfter(dq);
      if (step > 1) Add<0>(dq, step - 2);
      WgmmaWait<0>();
      KeepAfter(c);
      Packed<kScores> prob;
      ScoresOf(at).Probabilities(prob, c, Base::LseOf(stage), at.flags & Step::kMasked);
      BarrierArrive(base + Shape::kQFree + stage * 8);
      if (step > 0) BarrierWait(base + Shape::kPFree, (step - 1) % 2);
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        Handed()[i / 4 * kWarpgroup] = make_float4(c[i], c[i + 1], c[i + 2], c[i + 3]);
      }
      BarrierArrive(base + Shape::kPReady);

      AwaitDo(step);
      ClearStrangers<GradTile>(DoOf(step), at);
      WgmmaFence();
      Base::template SumOverQueries<GradTile>(dv, prob, DoOf(step));
      WgmmaCommit();
    }
    WgmmaWait<0>();
    KeepAfter(dv);
    for (int late = max(step - 2, 0); late < step; ++late) FinishDq(late);
    BarrierMeet(kWorkersMeet, Shape::kWorkers);  // nobody reads K and V any more
    StoreAccumulators<T, ValueTile>(base + Shape::kV, 0, 0, thread, dv, 1.0f);
  }

  // kGroup 1: dP, dS, dK, and dQ one step late.
  __device__ __forceinline__ void RunKeys() const {
    float dk[KeyTile::kDim / 2];
#pragma unroll
    for (int i = 0; i < KeyTile::kDim / 2; ++i) dk[i] = 0.0f;

    int step = 0;
    for (; TakeStep(step); ++step) {
      const Step& at = StepAt(step);
      // (The first dQ is of nothing, and dropped.)
      if (step > 0) AwaitDs(step - 1);
      float dp[kScores], dq[kDqSums];
      WgmmaFence();
      SumOverKeys<0>(dq, DsOf(step + 1));
      WgmmaCommit();
      WgmmaWait<1>();
      if (step > 0) BarrierArrive(base + Shape::kQFree + (step - 1) % kStages * 8);

      AwaitDo(step);
      WgmmaFence();
      Base::template KeysByQueries<ValueTile, GradTile>(dp, base + Shape::kV, DoOf(step));
      WgmmaCommit();
      WgmmaWait<1>();
      KeepAfter(dq);
      if (step > 0) Add<0>(dq, step - 1);
      WgmmaFence();
      SumOverKeys<1>(dq, DsOf(step + 1));
      WgmmaCommit();
      WgmmaWait<1>();
      KeepAfter(dp);
      Arrive(base + Shape::kDoFree + step % kStages * 8);
      BarrierWait(base + Shape::kPReady, step % 2);
      float c[kScores];
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        const float4 x = Handed()[i / 4 * kWarpgroup];
        c[i] = x.x, c[i + 1] = x.y, c[i + 2] = x.z, c[i + 3] = x.w;
      }
      ScoresOf(at).Slopes(c, dp, Base::DeltaOf(step % kStages), at.flags & Step::kMasked);
      Packed<kScores> ds;
      PackAll<T>(ds, c);
      BarrierArrive(base + Shape::kPFree);
      // Both have read the dS of two steps ago: this warpgroup before it wrote the last one, the
      // other before it handed over P.
      StorePacked<ScoreTile>(DsOf(step), 0, 0, thread, ds);
      WgmmaWait<0>();
      KeepAfter(dq);
      FenceAsync();
      Arrive(base + Shape::kScoresReady + step % 2 * 8);

      WgmmaFence();
      Base::template SumOverQueries<QueryTile>(dk, ds, QOf(step));
      WgmmaCommit();
      if (step > 0) Add<1>(dq, step - 1);
    }
    WgmmaWait<0>();
    KeepAfter(dk);
    if (step > 0) FinishDq(step - 1);
    BarrierMeet(kWorkersMeet, Shape::kWorkers);  // nobody reads K and V any more
    StoreAccumulators<T, KeyTile>(base + Shape::kK, 0, 0, thread, dk, p.scale);
  }
};

// A worker of either kind, from the first step to the last store.
template <int kGroup, typename Worker>
__device__ __forceinline__ void RunGroup(const Worker& worker) {
  if constexpr (kGroup == 0) {
    worker.RunValues();
  } else {
    worker.RunKeys();
  }
  BarrierMeet(kWorkersMeet, Worker::kWorkers);
  worker.StoreKeys();
}

}  // namespace kvblock::hopper
