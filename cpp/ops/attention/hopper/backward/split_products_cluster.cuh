// The warpgroups of the Hopper backward kernel for head dim 256, in clusters of two CTAs.
//
// Additions to dq_accum leave a multiprocessor slowly, and 64 keys a step, which are all whose dK
// and dV fit into its registers, add 64 KB each time. So two CTAs with neighbouring keys go through
// the same queries, tell each other dS, and each computes and adds half of the columns of the dQ of
// both:
//
//   kGroup 0   S, P, dV     of the CTA's 64 keys and the 64 queries of a step
//   kGroup 1   dP, dS, dK
//   both       dQ           64 columns each, of the 128 keys of the cluster
//
// P goes from kGroup 0 to kGroup 1 rounded, in the place that dS then takes. From there the copy
// engine sends dS to the other CTA, which tells when it has come: only then may the next P take its
// place. Each CTA loads half of the columns of Q and dO, for both. The
// products of a step, and what runs under them:
//
//   kGroup 0                kGroup 1                 the warpgroup
//   S                       dP
//   dQ (the step before)    dQ (the step before)     P; adds half of that dQ, dS
//   dV                      dK                       adds that dQ; the other half
//
// The CTAs are never more than a step apart: dQ needs the dS of both, and dS is sent when the one
// before has been read.
#pragma once

#include <cstdint>

#include "device/cluster.cuh"
#include "device/ldmatrix.cuh"
#include "ops/attention/hopper/backward/own_products.cuh"

namespace kvblock::hopper {

template <typename T, typename Shape, bool kPlain, int kGroup>
struct SplitProductsClusterWorker {
  using KeyTile = typename Shape::KeyTile;
  using PeerKeyTile = typename Shape::PeerKeyTile;
  using ValueTile = typename Shape::ValueTile;
  using QueryTile = typename Shape::QueryTile;
  using GradTile = typename Shape::GradTile;
  using ScoreTile = typename Shape::ScoreTile;
  using Step = BackwardStep;
  static constexpr int kStages = Shape::kStages, kKeys = Shape::kKeys;
  static constexpr int kScores = Shape::kQueries / 2, kDqSums = kChunkColumns / 2;

  const BackwardWorker<T, Shape, kPlain> w;

  // dS of this CTA, and of the other.
  __device__ __forceinline__ uint32_t Ds() const { return w.cta.Ds(0); }
  __device__ __forceinline__ uint32_t PeerDs() const { return w.cta.Ds(1); }
  // The chunk of 64 columns of dQ that this warpgroup computes and adds.
  __device__ __forceinline__ int Chunk() const { return ClusterRank() * 2 + kGroup; }

  // This warpgroup's chunk of dQ = dS K.
  __device__ __forceinline__ void SumOverKeys(float (&d)[kDqSums]) const {
    const uint32_t k = w.cta.K() + Chunk() * KeyTile::kChunkBytes;
    const uint32_t peer_k = w.cta.PeerK() + kGroup * PeerKeyTile::kChunkBytes;
    Multiply<T, kKeys / 16>(d, Down<ScoreTile>{SharedOperand(Ds())},
                            Down<KeyTile>{SharedOperand(k)});
    Multiply<T, kKeys / 16>(d, Down<ScoreTile>{SharedOperand(PeerDs())},
                            Down<PeerKeyTile>{SharedOperand(peer_k)}, true);
  }

  // Waits for the dS of both CTAs.
  __device__ __forceinline__ void AwaitDs(int step) const {
    BarrierWait(w.cta.DsFull(0), step % 2);
    BarrierWait(w.cta.PeerDsFull(), step % 2);
  }
  // The other CTA's dS is read.
  __device__ __forceinline__ void FreePeerDs() const {
    __syncwarp();
    if (w.thread % 32 == 0) ClusterBarrierArrive(w.cta.PeerDsFree(), ClusterRank() ^ 1);
  }

  // Adds one half of a step's dQ, and then the other.
  template <int kHalf>
  __device__ __forceinline__ void AddHalf(const float (&dq)[kDqSums], int step) const {
    if (w.p().dq_accum == nullptr) return;
    const Step& at = w.cta.StepAt(step);
    if (kHalf == 0) AwaitTurn(w, step);
    constexpr int kCount = kDqSums / 2;
    AddDq(w, reinterpret_cast<const float (&)[kCount]>(dq[kHalf * kCount]), at.head, at.first,
          Chunk() * 8 + kHalf * 4);
    if (kHalf == 1) PassTurn(w);
  }
  __device__ __forceinline__ void Add(const float (&dq)[kDqSums], int step) const {
    AddHalf<0>(dq, step);
    AddHalf<1>(dq, step);
  }
  // The dQ of the last step.
  __device__ __forceinline__ void FinishDq(int step) const {
    float dq[kDqSums];
    AwaitDs(step);
    WgmmaFence();
    SumOverKeys(dq);
    WgmmaCommit();
    WgmmaWait<0>();
    KeepAfter(dq);
    Add(dq, step);
  }

  // kGroup 0: S, P, dV. The dQ before the first is of nothing, and dropped.
  __device__ __forceinline__ void RunValues() const {
    float dv[ValueTile::kDim / 2];
    ClearSums(dv);

    int step = 0;
    for (; w.TakeStep(step); ++step) {
      const Step& at = w.cta.StepAt(step);
      const int stage = step % kStages;
      ClearQueries<QueryTile>(w, w.cta.Q(step % kStages), at);
      float c[kScores], dq[kDqSums];
      WgmmaFence();
      w.template KeysByQueries<KeyTile, QueryTile>(c, w.cta.K(), w.cta.Q(step % kStages));
      WgmmaCommit();
      if (step > 0) AwaitDs(step - 1);
      WgmmaFence();
      SumOverKeys(dq);
      WgmmaCommit();

      WgmmaWait<1>();
      KeepAfter(c);
      if (step > 0) w.LeaveGrads((step - 1) % kStages);
      Packed<kScores> prob, weights;
      ScoresOf(w, at).Probabilities(prob, c, w.cta.Lse(stage), at.flags & Step::kMasked);
      PackAll<T>(weights, c);
      if constexpr (Shape::kDrops) DropoutOf(w, at).Drop(prob);
      w.cta.LeaveStep(stage);
      WgmmaWait<0>();
      KeepAfter(dq);
      if (step > 0) {
        FreePeerDs();
        BarrierWait(w.cta.PFree(), (step - 1) % 2);
      }
      StorePacked<ScoreTile>(Ds(), 0, 0, w.thread, weights);
      BarrierArrive(w.cta.PFull());

      w.cta.AwaitGrads(step % kStages, step / kStages % 2);
      ClearQueries<GradTile>(w, w.cta.Grads(step % kStages), at);
      WgmmaFence();
      w.template SumOverQueries<GradTile>(dv, prob, w.cta.Grads(step % kStages));
      WgmmaCommit();
      if (step > 0) Add(dq, step - 1);
    }
    WgmmaWait<0>();
    KeepAfter(dv);
    if (step > 0) FinishDq(step - 1);
    BarrierMeet(kWorkersMeet, Shape::kWorkers);  // nobody reads K and V any more
    if constexpr (Shape::kDrops) {
      StoreAccumulators<T, ValueTile>(w.cta.V(), 0, 0, w.thread, dv, w.ValueScale());
    } else {
      StoreAccumulators<T, ValueTile>(w.cta.V(), 0, 0, w.thread, dv, 1.0f);
    }
  }

  // dS = P (dP - delta), packed; P, or with a softcap P times its slope, as it was handed over.
  __device__ __forceinline__ void Slopes(Packed<kScores>& ds, const float (&dp)[kScores],
                                         const float* delta, bool masked) const {
    const uint32_t mine =
        Ds() + ScoreTile::Offset(w.thread / 32 * 16 + w.thread % 16, w.thread % 32 / 16 * 8);
#pragma unroll
    for (int k = 0; k < kScores / 8; ++k) LoadMatrices(ds[k], mine ^ k * 32);
    PackedSlopes<T, false>(ds, ds, dp, delta, w.thread, masked);
  }

  // kGroup 1: dP, dS, dK.
  __device__ __forceinline__ void RunKeys() const {
    float dk[KeyTile::kDim / 2];
    ClearSums(dk);

    int step = 0;
    for (; w.TakeStep(step); ++step) {
      const Step& at = w.cta.StepAt(step);
      w.cta.AwaitGrads(step % kStages, step / kStages % 2);
      float dp[kScores], dq[kDqSums];
      WgmmaFence();
      w.template KeysByQueries<ValueTile, GradTile>(dp, w.cta.V(), w.cta.Grads(step % kStages));
      WgmmaCommit();
      if (step > 0) {
        AwaitDs(step - 1);
        if (w.thread == 0) ClusterBarrierArrive(w.cta.PeerDsSent(), ClusterRank() ^ 1);
      }
      WgmmaFence();
      SumOverKeys(dq);
      WgmmaCommit();

      WgmmaWait<1>();
      KeepAfter(dp);
      if (step > 0) w.cta.LeaveStep((step - 1) % kStages);
      w.LeaveGrads(step % kStages);
      WgmmaWait<0>();
      KeepAfter(dq);
      if (step > 0) {
        FreePeerDs();
        if (w.thread == 0) BarrierWait(w.cta.PeerDsSent(), (step - 1) % 2);
        BarrierArrive(w.cta.PFree());
        AddHalf<0>(dq, step - 1);  // while kGroup 0 computes P
      }
      BarrierWait(w.cta.PFull(), step % 2);
      if constexpr (Shape::kDrops) DropoutOf(w, at).DropGrads(dp);
      Packed<kScores> ds;
      Slopes(ds, dp, w.cta.Delta(step % kStages), at.flags & Step::kMasked);
      StorePacked<ScoreTile>(Ds(), 0, 0, w.thread, ds);
      FenceAsync();
      w.Arrive(w.cta.DsFull(0));
      BarrierMeet(kWarpgroupMeets + kGroup, kWarpgroup);
      WgmmaFence();
      w.template SumOverQueries<QueryTile>(dk, ds, w.cta.Q(step % kStages));
      WgmmaCommit();
      if (w.thread == 0) {
        BarrierExpect(w.cta.PeerDsFull(), ScoreTile::kBytes);
        if (step > 0) BarrierWait(w.cta.PeerDsFree(), (step - 1) % 2);
        SendBytes(PeerDs(), Ds(), ScoreTile::kBytes, w.cta.PeerDsFull(), ClusterRank() ^ 1);
      }
      if (step > 0) AddHalf<1>(dq, step - 1);
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
