// A warpgroup of the Hopper backward kernel that owns 64 keys and all columns of their dK and dV,
// for keys of 192 columns and values of 128.
//
// dK and dV take 160 registers of a thread. Of the 240 there are, sums can lie in no more than 216,
// so S and dP are computed one after the other (split_keys.cuh has them at the same time), and the
// A operands wait where they need the fewest: P is packed before dP, and dK reads dS from shared
// memory, as dQ does.
//
//   S
//   dP
//   dV      dS becomes visible to the other warpgroup
//   dQ      (64 queries by half of the columns)
//   dK      dQ goes to shared memory
#pragma once

#include <cstdint>

#include "ops/attention/hopper/backward/own_keys.cuh"

namespace kvblock::hopper {

template <typename T, typename Shape, bool kPlain>
struct SplitKeysSequentialWorker {
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  using QueryTile = typename Shape::QueryTile;
  using GradTile = typename Shape::GradTile;
  using ScoreTile = typename Shape::ScoreTile;
  using Step = BackwardStep;
  static constexpr int kQueries = Shape::kQueries, kKeys = Shape::kKeys;
  static constexpr int kScores = kQueries / 2, kDqSums = Shape::kDqColumns / 2;
  static_assert(KeyTile::kChunks == 3 && kDqSums == 48);

  // Whether what dS is made of is another P than that of dV: both would have to wait.
  static constexpr bool kValuesFirst = !kPlain || Shape::kDrops;

  const BackwardWorker<T, Shape, kPlain> w;

  // dK += dS^T Q: dS from where dQ reads it, too.
  __device__ __forceinline__ void SumSlopes(float (&dk)[KeyTile::kDim / 2], uint32_t q) const {
    const uint32_t ds = w.cta.Ds(0) + w.group * ScoreTile::kChunkBytes;
    Multiply<T, kQueries / 16>(dk, Down<ScoreTile>{SharedOperand(ds)},
                               Down<QueryTile>{SharedOperand(q, QueryTile::kChunkBytes)}, true);
  }

  // This warpgroup's 96 columns of dQ = dS K: the first or the last chunk of 64 and, after it, that
  // half of the middle one, which therefore lies behind both.
  __device__ __forceinline__ void SumOverKeys(float (&d)[kDqSums]) const {
    const uint32_t k = w.cta.K() + w.group * KeyTile::kChunkBytes;
    const int to_half =
        w.group == 0 ? 2 * KeyTile::kChunkBytes : KeyTile::kChunkBytes + kChunkRowBytes / 2;
    Multiply<T, kKeys / 16>(d, Across<ScoreTile>{SharedOperand(w.cta.Ds(0))},
                            Down<KeyTile>{SharedOperand(k, to_half)});
  }

  // Leaves the dQ of a step to the warp that adds it (adder.cuh).
  __device__ __forceinline__ void HandOver(const float (&dq)[kDqSums], int step) const {
    constexpr int kOfChunk = kChunkColumns / 8;
    static_assert(Shape::kDqStages == 1);
    BarrierWait(w.cta.DqFree(w.group), step % 2 ^ 1);
    char* const to = w.cta.memory + static_cast<int>(offsetof(BackwardShared<Shape>, passed.dq)) +
                     w.group * Shape::kDqBytes + w.thread * 16;
    char* const to_chunk = to + w.group * (kDqSums / 4 - kOfChunk) * kDqBlockBytes;
    char* const to_half = to + (1 - w.group) * kOfChunk * kDqBlockBytes;
#pragma unroll
    for (int n = 0; n < kDqSums / 4; ++n) {
      char* const block =
          n < kOfChunk ? to_chunk + n * kDqBlockBytes : to_half + (n - kOfChunk) * kDqBlockBytes;
      WriteBlock(block, dq, n);
    }
    FenceAsync();
    BarrierArrive(w.cta.DqFull(w.group));
  }

  // P of a step, packed, and with options P times the slope of a softcap: they take more registers,
  // so half of the queries come after the other.
  __device__ __forceinline__ void Probabilities(Packed<kScores>& prob, Packed<kScores>& weights,
                                                const Step& at, uint32_t q,
                                                const float* lse) const {
    constexpr int kParts = kPlain ? 1 : 2, kCount = kScores / kParts;
    const bool masked = at.flags & Step::kMasked;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int query = part * kCount * 2;
      float c[kCount];
      WgmmaFence();
      w.template KeysByQueries<KeyTile, QueryTile>(c, OwnRows(w, w.cta.K()),
                                                   q + query * kChunkRowBytes);
      WgmmaCommit();
      WgmmaWait<0>();
      KeepAfter(c);
      const auto scores = w.template Scores<kCount>(w.cta.owned().first_key + w.group * 64,
                                                    at.first + query, at.head, at.flags);
      Packed<kCount> packed;
      scores.Probabilities(packed, c, lse + query, !kPlain && masked);
      if (kPlain && masked) scores.MaskPacked(packed);
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const int to = part * kCount / 2 + i;
        prob[to / 4][to % 4] = packed[i / 4][i % 4];
        weights[to / 4][to % 4] = kPlain ? packed[i / 4][i % 4] : Pack<T>(c[i * 2], c[i * 2 + 1]);
      }
    }
  }

  __device__ __forceinline__ void Run() const {
    const BackwardCta<Shape>& cta = w.cta;
    const bool has_dq = cta.p.dq_accum != nullptr;
    float dk[KeyTile::kDim / 2], dv[ValueTile::kDim / 2];
    ClearSums(dk);
    ClearSums(dv);

    int step = 0, flags = w.AwaitFlags(0);
    if (!(flags & Step::kEnd)) w.TakeKeys();
    for (; !(flags & Step::kEnd); ++step) {
      const int stage = step % Shape::kStages, phase = step / Shape::kStages % 2;
      const uint32_t q = w.cta.Q(stage), d_o = w.cta.Grads(stage);
      const Step& at = cta.StepAt(step);
      const bool masked = flags & Step::kMasked;
      if (flags & Step::kPartial) ClearQueries(w, at.first, stage, phase);

      // S and P; with options dV.
      Packed<kScores> prob, weights;
      Probabilities(prob, weights, at, q, w.cta.Lse(stage));
      const auto drops = w.DropoutOf(cta.owned().first_key + w.group * 64, at.first, at.head);
      drops.Drop(prob);
      cta.AwaitGrads(stage, phase);
      if constexpr (kValuesFirst) {
        WgmmaFence();
        w.template SumOverQueries<GradTile>(dv, prob, d_o);
        WgmmaCommit();
        WgmmaWait<0>();
        KeepAfter(dv);
      }

      // dP and dS.
      float dp[kScores];
      WgmmaFence();
      w.template KeysByQueries<ValueTile, GradTile>(dp, OwnRows(w, w.cta.V()), d_o);
      WgmmaCommit();
      WgmmaWait<0>();
      KeepAfter(dp);
      drops.DropGrads(dp);
      Packed<kScores> ds;
      PackedSlopes<T, true>(ds, weights, dp, w.cta.Delta(stage), w.thread, masked);
      // Both have read the dS before.
      if (step > 0) BarrierWait(cta.DsFull(0), (step - 1) % 2);
      StoreTransposed<ScoreTile>(cta.Ds(0), 0, w.group * 64, w.thread, ds);

      // dV, under which dS becomes visible; dQ, once dV's operand is gone; dK.
      if constexpr (!kValuesFirst) {
        WgmmaFence();
        w.template SumOverQueries<GradTile>(dv, prob, d_o);
        WgmmaCommit();
      }
      FenceAsync();
      BarrierMeet(kWorkersMeet, Shape::kWorkers);
      WgmmaWait<0>();
      KeepAfter(dv);
      w.LeaveGrads(stage);
      float dq[kDqSums];
      WgmmaFence();
      SumOverKeys(dq);
      WgmmaCommit();
      WgmmaFence();
      SumSlopes(dk, q);
      WgmmaCommit();

      flags = w.AwaitNextFlags(step);  // while the products run

      // dQ goes out under dK.
      WgmmaWait<1>();
      KeepAfter(dq);
      w.Arrive(cta.DsFull(0));
      if (has_dq) HandOver(dq, step);
      WgmmaWait<0>();
      cta.LeaveStep(stage);
    }

    WgmmaWait<0>();
    KeepAfter(dk);
    KeepAfter(dv);
    // StoreSums (own_keys.cuh), written out: called, it comes out with other registers here.
    const bool boxes =
        cta.p.cu_q == nullptr || cta.owned().first_key + kKeys <= w.sequence().kv_rows;
    if constexpr (Shape::kDrops) {
      StoreAccumulators<T, ValueTile>(cta.V(), w.group * 64, 0, w.thread, dv, w.ValueScale());
    } else {
      StoreAccumulators<T, ValueTile>(cta.V(), w.group * 64, 0, w.thread, dv, 1.0f);
    }
    FenceAsync();
    BarrierMeet(kWarpgroupMeets + w.group, kWarpgroup);
    if (boxes && w.thread == 0) StoreBoxes<ValueTile>(w, cta.maps.dv, cta.V());
    BarrierMeet(kWorkersMeet, Shape::kWorkers);  // nobody reads K any more
    if constexpr (Shape::kDrops) {
      StoreAccumulators<T, KeyTile>(cta.K(), w.group * 64, 0, w.thread, dk, w.KeyScale());
    } else {
      StoreAccumulators<T, KeyTile>(cta.K(), w.group * 64, 0, w.thread, dk, cta.p.scale);
    }
    FenceAsync();
    BarrierMeet(kWarpgroupMeets + w.group, kWarpgroup);
    if (boxes && w.thread == 0) StoreBoxes<KeyTile>(w, cta.maps.dk, cta.K());
    if (boxes) {
      if (w.thread == 0) WaitStoresRead<0>();
    } else {
      BarrierMeet(kWorkersMeet, Shape::kWorkers);
      w.StoreKeys();
    }
  }
};

}  // namespace kvblock::hopper
