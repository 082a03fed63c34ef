// The warpgroups of the Hopper backward kernel that share the products instead of the keys, for
// head dims of which dK and dV of 64 keys do not fit into the registers of one. (Head dim 256 does
// dQ otherwise: split_products_cluster.cuh.)
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

#include "ops/attention/hopper/backward/own_products.cuh"

namespace kvblock::hopper {

template <typename T, typename Shape, bool kPlain, int kGroup>
struct SplitProductsWorker {
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  using QueryTile = typename Shape::QueryTile;
  using GradTile = typename Shape::GradTile;
  using ScoreTile = typename Shape::ScoreTile;
  using Step = BackwardStep;
  static constexpr int kStages = Shape::kStages, kKeys = Shape::kKeys;
  static constexpr int kScores = Shape::kQueries / 2;
  static_assert(KeyTile::kChunks == 3);

  // This warpgroup's chunks of dQ, one after the other: two at once and the next scores would be
  // too much for the registers.
  static constexpr int kDqFirst = kGroup, kDqChunks = kGroup + 1, kDqSums = kChunkColumns / 2;

  const BackwardWorker<T, Shape, kPlain> w;

  __device__ __forceinline__ uint32_t DsOf(int step) const { return w.cta.Ds(step % 2); }
  __device__ __forceinline__ void AwaitDs(int step) const {
    BarrierWait(w.cta.DsFull(step % 2), step / 2 % 2);
  }

  // A chunk of this warpgroup's columns of dQ = dS K.
  template <int kChunk>
  __device__ __forceinline__ void SumOverKeys(float (&d)[kDqSums], uint32_t ds) const {
    const uint32_t k = w.cta.K() + (kDqFirst + kChunk) * KeyTile::kChunkBytes;
    Multiply<T, kKeys / 16>(d, Down<ScoreTile>{SharedOperand(ds)}, Down<KeyTile>{SharedOperand(k)});
  }

  // Where this thread of kGroup 0 leaves its part of P for that of kGroup 1, in pieces of four.
  __device__ __forceinline__ float4* Handed() const {
    return reinterpret_cast<float4*>(w.cta.HandedP()) + w.thread;
  }

  // Adds a chunk of a step's dQ.
  template <int kChunk>
  __device__ __forceinline__ void Add(const float (&dq)[kDqSums], int step) const {
    if (w.p().dq_accum == nullptr) return;
    const Step& at = w.cta.StepAt(step);
    if (kChunk == 0) AwaitTurn(w, step);
    AddDq(w, dq, at.head, at.first, (kDqFirst + kChunk) * 8);
    if (kChunk == kDqChunks - 1) PassTurn(w);
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
    float dv[ValueTile::kDim / 2];
    ClearSums(dv);

    int step = 0;
    for (; w.TakeStep(step); ++step) {
      const Step& at = w.cta.StepAt(step);
      const int stage = step % kStages;
      ClearQueries<QueryTile>(w, w.cta.Q(step % kStages), at);
      // (The first two dQ are of nothing, and dropped.)
      if (step > 1) AwaitDs(step - 2);
      float c[kScores], dq[kDqSums];
      WgmmaFence();
      SumOverKeys<0>(dq, DsOf(step));
      WgmmaCommit();
      WgmmaWait<1>();
      if (step > 0) w.LeaveGrads((step - 1) % kStages);

      WgmmaFence();
      w.template KeysByQueries<KeyTile, QueryTile>(c, w.cta.K(), w.cta.Q(step % kStages));
      WgmmaCommit();
      WgmmaWait<1>();
      KeepAfter(dq);
      if (step > 1) Add<0>(dq, step - 2);
      WgmmaWait<0>();
      KeepAfter(c);
      Packed<kScores> prob;
      ScoresOf(w, at).Probabilities(prob, c, w.cta.Lse(stage), at.flags & Step::kMasked);
      if constexpr (Shape::kDrops) DropoutOf(w, at).Drop(prob);
      w.cta.LeaveStep(stage);
      if (step > 0) BarrierWait(w.cta.PFree(), (step - 1) % 2);
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        Handed()[i / 4 * kWarpgroup] = make_float4(c[i], c[i + 1], c[i + 2], c[i + 3]);
      }
      BarrierArrive(w.cta.PFull());

      w.cta.AwaitGrads(step % kStages, step / kStages % 2);
      ClearQueries<GradTile>(w, w.cta.Grads(step % kStages), at);
      WgmmaFence();
      w.template SumOverQueries<GradTile>(dv, prob, w.cta.Grads(step % kStages));
      WgmmaCommit();
    }
    WgmmaWait<0>();
    KeepAfter(dv);
    for (int late = max(step - 2, 0); late < step; ++late) FinishDq(late);
    BarrierMeet(kWorkersMeet, Shape::kWorkers);  // nobody reads K and V any more
    if constexpr (Shape::kDrops) {
      StoreAccumulators<T, ValueTile>(w.cta.V(), 0, 0, w.thread, dv, w.ValueScale());
    } else {
      StoreAccumulators<T, ValueTile>(w.cta.V(), 0, 0, w.thread, dv, 1.0f);
    }
  }

  // kGroup 1: dP, dS, dK, and dQ one step late.
  __device__ __forceinline__ void RunKeys() const {
    float dk[KeyTile::kDim / 2];
    ClearSums(dk);

    int step = 0;
    for (; w.TakeStep(step); ++step) {
      const Step& at = w.cta.StepAt(step);
      // (The first dQ is of nothing, and dropped.)
      if (step > 0) AwaitDs(step - 1);
      float dp[kScores], dq[kDqSums];
      WgmmaFence();
      SumOverKeys<0>(dq, DsOf(step + 1));
      WgmmaCommit();
      WgmmaWait<1>();
      if (step > 0) w.cta.LeaveStep((step - 1) % kStages);

      w.cta.AwaitGrads(step % kStages, step / kStages % 2);
      WgmmaFence();
      w.template KeysByQueries<ValueTile, GradTile>(dp, w.cta.V(), w.cta.Grads(step % kStages));
      WgmmaCommit();
      WgmmaWait<1>();
      KeepAfter(dq);
      if (step > 0) Add<0>(dq, step - 1);
      WgmmaFence();
      SumOverKeys<1>(dq, DsOf(step + 1));
      WgmmaCommit();
      WgmmaWait<1>();
      KeepAfter(dp);
      w.LeaveGrads(step % kStages);
      BarrierWait(w.cta.PFull(), step % 2);
      float c[kScores];
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        const float4 x = Handed()[i / 4 * kWarpgroup];
        c[i] = x.x, c[i + 1] = x.y, c[i + 2] = x.z, c[i + 3] = x.w;
      }
      if constexpr (Shape::kDrops) DropoutOf(w, at).DropGrads(dp);
      ScoresOf(w, at).Slopes(c, dp, w.cta.Delta(step % kStages), at.flags & Step::kMasked);
      Packed<kScores> ds;
      PackAll<T>(ds, c);
      BarrierArrive(w.cta.PFree());
      // Both have read the dS of two steps ago: this warpgroup before it wrote the last one, the
      // other before it handed over P.
      StorePacked<ScoreTile>(DsOf(step), 0, 0, w.thread, ds);
      WgmmaWait<0>();
      KeepAfter(dq);
      FenceAsync();
      w.Arrive(w.cta.DsFull(step % 2));

      WgmmaFence();
      w.template SumOverQueries<QueryTile>(dk, ds, w.cta.Q(step % kStages));
      WgmmaCommit();
      if (step > 0) Add<1>(dq, step - 1);
    }
    WgmmaWait<0>();
    KeepAfter(dk);
    if (step > 0) FinishDq(step - 1);
    BarrierMeet(kWorkersMeet, Shape::kWorkers);  // nobody reads K and V any more
    if constexpr (Shape::kDrops) {
      StoreAccumulators<T, KeyTile>(w.cta.K(), 0, 0, w.thread, dk, w.KeyScale());
    } else {
      StoreAccumulators<T, KeyTile>(w.cta.K(), 0, 0, w.thread, dk, w.p().scale);
    }
  }
};

}  // namespace kvblock::hopper
