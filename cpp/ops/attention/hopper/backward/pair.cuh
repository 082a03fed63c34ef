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
#include "ops/attention/hopper/backward/wide.cuh"

namespace kvblock::hopper {

template <typename T, typename Shape, bool kPlain, int kGroup>
struct PairWorker : WideWorker<T, Shape, kPlain, kGroup> {
  using Wide = WideWorker<T, Shape, kPlain, kGroup>;
  using typename Wide::GradTile, typename Wide::KeyTile, typename Wide::QueryTile;
  using typename Wide::ScoreTile, typename Wide::Step, typename Wide::ValueTile;
  using Wide::Arrive, Wide::AwaitDo, Wide::ClearStrangers, Wide::DoOf, Wide::owned, Wide::QOf;
  using Wide::base, Wide::kDqSums, Wide::kKeys, Wide::kScores, Wide::kStages, Wide::p;
  using Wide::ScoresOf, Wide::StepAt;
  using Wide::shared, Wide::thread;
  using PeerKeyTile = typename Shape::PeerKeyTile;

  __device__ __forceinline__ int Chunk() const { return ClusterRank() * 2 + kGroup; }

  // This warpgroup's chunk of dQ = dS K.
  __device__ __forceinline__ void SumOverKeys(float (&d)[kDqSums]) const {
    const auto sum = [&](uint32_t ds, uint32_t k, bool accumulate) {
      const uint64_t a = SharedOperand(ds), b = SharedOperand(k);
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i) {
        Wgmma<kChunkColumns>::template Shared<T, OperandLies::kDown, OperandLies::kDown>(
            d, Advance(a, i * 16 * kChunkRowBytes), Advance(b, i * 16 * kChunkRowBytes),
            accumulate || i > 0);
      }
    };
    sum(base + Shape::kDs, base + Shape::kK + Chunk() * KeyTile::kChunkBytes, false);
    sum(base + Shape::kPeerDs, base + Shape::kPeerK + kGroup * PeerKeyTile::kChunkBytes, true);
  }

  // Waits for the K and V of this CTA, and what it has of the other's K. Rows of K that take no
  // part become zeros, because dQ sums over them.
  __device__ __forceinline__ void TakeKeys() const {
    BarrierWait(base + Shape::kKFull, 0);
    BarrierWait(base + Shape::kVFull, 0);
    BarrierWait(base + Shape::kPeerKFull, 0);
    const Sequence& s = owned().sequence;
    const int first = owned().first_key, worker = kGroup * kWarpgroup + thread;
    if (s.kv_len < (first | kKeys) + kKeys && (p.cu_q != nullptr || s.kv_len < s.kv_rows)) {
      ZeroRows<KeyTile>(shared + Shape::kK, max(s.kv_len - first, 0), worker, Shape::kWorkers);
      ZeroRows<PeerKeyTile>(shared + Shape::kPeerK, max(s.kv_len - (first ^ kKeys), 0), worker,
                            Shape::kWorkers);
      FenceAsync();
      BarrierMeet(kWorkersMeet, Shape::kWorkers);
    }
  }
  // Waits for Q, lse and delta of a step. False: there is none.
  __device__ __forceinline__ bool TakeStep(int step) const {
    BarrierWait(base + Shape::kQFull + step % kStages * 8, step / kStages % 2);
    if (StepAt(step).flags & Step::kEnd) return false;
    if (step == 0) TakeKeys();
    return true;
  }
  // Waits for the dS of both CTAs.
  __device__ __forceinline__ void AwaitDs(int step) const {
    BarrierWait(base + Shape::kScoresReady, step % 2);
    BarrierWait(base + Shape::kPeerDsFull, step % 2);
  }
  // The other CTA's dS is read.
  __device__ __forceinline__ void FreePeerDs() const {
    __syncwarp();
    if (thread % 32 == 0) ClusterBarrierArrive(base + Shape::kPeerDsFree, ClusterRank() ^ 1);
  }

  // Adds one half of a step's dQ, and then the other.
  template <int kHalf>
  __device__ __forceinline__ void AddHalf(const float (&dq)[kDqSums], int step) const {
    if (p.dq_accum == nullptr) return;
    const Step& at = StepAt(step);
    if (kHalf == 0) Wide::AwaitTurn(step);
    constexpr int kCount = kDqSums / 2;
    Wide::AddDq(reinterpret_cast<const float (&)[kCount]>(dq[kHalf * kCount]), at.head, at.first,
                Chunk() * 8 + kHalf * 4);
    if (kHalf == 1) Wide::PassTurn();
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
#pragma unroll
    for (int i = 0; i < ValueTile::kDim / 2; ++i) dv[i] = 0.0f;

    int step = 0;
    for (; TakeStep(step); ++step) {
      const Step& at = StepAt(step);
      const int stage = step % kStages;
      Wide::template ClearStrangers<QueryTile>(QOf(step), at);
      float c[kScores], dq[kDqSums];
      WgmmaFence();
      Wide::template KeysByQueries<KeyTile, QueryTile>(c, base + Shape::kK, QOf(step));
      WgmmaCommit();
      if (step > 0) AwaitDs(step - 1);
      WgmmaFence();
      SumOverKeys(dq);
      WgmmaCommit();

      WgmmaWait<1>();
      KeepAfter(c);
      if (step > 0) Arrive(base + Shape::kDoFree + (step - 1) % kStages * 8);
      Packed<kScores> prob, weights;
      ScoresOf(at).Probabilities(prob, c, Wide::LseOf(stage), at.flags & Step::kMasked);
      PackAll<T>(weights, c);
      BarrierArrive(base + Shape::kQFree + stage * 8);
      WgmmaWait<0>();
      KeepAfter(dq);
      if (step > 0) {
        FreePeerDs();
        BarrierWait(base + Shape::kPFree, (step - 1) % 2);
      }
      StorePacked<ScoreTile>(base + Shape::kDs, 0, 0, thread, weights);
      BarrierArrive(base + Shape::kPReady);

      AwaitDo(step);
      Wide::template ClearStrangers<GradTile>(DoOf(step), at);
      WgmmaFence();
      Wide::template SumOverQueries<GradTile>(dv, prob, DoOf(step));
      WgmmaCommit();
      if (step > 0) Add(dq, step - 1);
    }
    WgmmaWait<0>();
    KeepAfter(dv);
    if (step > 0) FinishDq(step - 1);
    BarrierMeet(kWorkersMeet, Shape::kWorkers);  // nobody reads K and V any more
    StoreAccumulators<T, ValueTile>(base + Shape::kV, 0, 0, thread, dv, 1.0f);
  }

  // dS = P (dP - delta), packed; P, or with a softcap P times its slope, as it was handed over.
  __device__ __forceinline__ void Slopes(Packed<kScores>& ds, const float (&dp)[kScores],
                                         const float* delta, bool masked) const {
    const uint32_t mine =
        base + Shape::kDs + ScoreTile::Offset(thread / 32 * 16 + thread % 16, thread % 32 / 16 * 8);
#pragma unroll
    for (int k = 0; k < kScores / 8; ++k) LoadMatrices(ds[k], mine ^ k * 32);
#pragma unroll
    for (int n = 0; n < kScores / 4; ++n) {
      const float2 d = RowPair(delta, n, thread);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = n * 4 + h * 2;
        uint32_t& packed = ds[n / 2][n % 2 * 2 + h];
        packed = PackSlopes<T>(packed, dp[i] - d.x, dp[i + 1] - d.y, masked);
      }
    }
  }

  // kGroup 1: dP, dS, dK.
  __device__ __forceinline__ void RunKeys() const {
    float dk[KeyTile::kDim / 2];
#pragma unroll
    for (int i = 0; i < KeyTile::kDim / 2; ++i) dk[i] = 0.0f;

    int step = 0;
    for (; TakeStep(step); ++step) {
      const Step& at = StepAt(step);
      AwaitDo(step);
      float dp[kScores], dq[kDqSums];
      WgmmaFence();
      Wide::template KeysByQueries<ValueTile, GradTile>(dp, base + Shape::kV, DoOf(step));
      WgmmaCommit();
      if (step > 0) {
        AwaitDs(step - 1);
        if (thread == 0) ClusterBarrierArrive(base + Shape::kPeerDsSent, ClusterRank() ^ 1);
      }
      WgmmaFence();
      SumOverKeys(dq);
      WgmmaCommit();

      WgmmaWait<1>();
      KeepAfter(dp);
      if (step > 0) BarrierArrive(base + Shape::kQFree + (step - 1) % kStages * 8);
      Arrive(base + Shape::kDoFree + step % kStages * 8);
      WgmmaWait<0>();
      KeepAfter(dq);
      if (step > 0) {
        FreePeerDs();
        if (thread == 0) BarrierWait(base + Shape::kPeerDsSent, (step - 1) % 2);
        BarrierArrive(base + Shape::kPFree);
        AddHalf<0>(dq, step - 1);  // while kGroup 0 computes P
      }
      BarrierWait(base + Shape::kPReady, step % 2);
      Packed<kScores> ds;
      Slopes(ds, dp, Wide::DeltaOf(step % kStages), at.flags & Step::kMasked);
      StorePacked<ScoreTile>(base + Shape::kDs, 0, 0, thread, ds);
      FenceAsync();
      Arrive(base + Shape::kScoresReady);
      BarrierMeet(kWarpgroupMeets + kGroup, kWarpgroup);
      WgmmaFence();
      Wide::template SumOverQueries<QueryTile>(dk, ds, QOf(step));
      WgmmaCommit();
      if (thread == 0) {
        BarrierExpect(base + Shape::kPeerDsFull, ScoreTile::kBytes);
        if (step > 0) BarrierWait(base + Shape::kPeerDsFree, (step - 1) % 2);
        SendBytes(base + Shape::kPeerDs, base + Shape::kDs, ScoreTile::kBytes,
                  base + Shape::kPeerDsFull, ClusterRank() ^ 1);
      }
      if (step > 0) AddHalf<1>(dq, step - 1);
    }
    WgmmaWait<0>();
    KeepAfter(dk);
    if (step > 0) FinishDq(step - 1);
    BarrierMeet(kWorkersMeet, Shape::kWorkers);  // nobody reads K and V any more
    StoreAccumulators<T, KeyTile>(base + Shape::kK, 0, 0, thread, dk, p.scale);
  }
};

}  // namespace kvblock::hopper
