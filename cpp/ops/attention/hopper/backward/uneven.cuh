// A warpgroup of the Hopper backward kernel that owns 64 keys and all columns of their dK and dV,
// for keys of 192 columns and values of 128.
//
// dK and dV take 160 registers of a thread. Of the 240 there are, sums can lie in no more than 216,
// so S and dP are never there at once (narrow.cuh), and the A operands wait where they
// need the fewest: P is packed before dP, and dK reads dS from shared memory, as dQ does.
//
//   S
//   dP
//   dV      dS becomes visible to the other warpgroup
//   dQ      (64 queries by half of the columns)
//   dK      dQ goes to shared memory
#pragma once

#include <cstdint>
#include <type_traits>

#include "ops/attention/hopper/backward/worker.cuh"

namespace kvblock::hopper {

template <typename T, typename Shape, bool kPlain>
struct UnevenWorker : BackwardWorker<T, Shape, kPlain> {
  using Base = BackwardWorker<T, Shape, kPlain>;
  using Base::Arrive, Base::owned, Base::StepAt;
  using Base::kQueries, Base::kKeys, Base::p, Base::maps, Base::base, Base::group, Base::thread;
  using typename Base::GradTile, typename Base::KeyTile, typename Base::QueryTile;
  using typename Base::ScoreTile, typename Base::Step, typename Base::ValueTile;
  static constexpr int kScores = kQueries / 2, kDqSums = Shape::kDqColumns / 2;
  static_assert(KeyTile::kChunks == 3 && kDqSums == 48);

  // dK += dS^T Q: dS from where dQ reads it, too.
  __device__ __forceinline__ void SumSlopes(float (&dk)[KeyTile::kDim / 2], uint32_t q) const {
    const uint64_t a = SharedOperand(base + Shape::kDs + group * ScoreTile::kChunkBytes);
    const uint64_t b = SharedOperand(q, QueryTile::kChunkBytes);
#pragma unroll
    for (int k = 0; k < kQueries / 16; ++k) {
      Wgmma<KeyTile::kDim>::template Shared<T, OperandLies::kDown, OperandLies::kDown>(
          dk, Advance(a, k * 16 * kChunkRowBytes), Advance(b, k * 16 * kChunkRowBytes));
    }
  }

  // This warpgroup's 96 columns of dQ = dS K: the first or the last chunk of 64 and, after it, that
  // half of the middle one, which therefore lies behind both.
  __device__ __forceinline__ void SumOverKeys(float (&d)[kDqSums]) const {
    const uint64_t a = SharedOperand(base + Shape::kDs);
    const uint64_t b = SharedOperand(
        base + Shape::kK + group * KeyTile::kChunkBytes,
        group == 0 ? 2 * KeyTile::kChunkBytes : KeyTile::kChunkBytes + kChunkRowBytes / 2);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      Wgmma<Shape::kDqColumns>::template Shared<T, OperandLies::kAcross, OperandLies::kDown>(
          d, Advance(a, k / 4 * ScoreTile::kChunkBytes + k % 4 * 32),
          Advance(b, k * 16 * kChunkRowBytes), k > 0);
    }
  }

  // Leaves the dQ of a step to the warp that adds it (adder.cuh).
  __device__ __forceinline__ void HandOver(const float (&dq)[kDqSums], int step) const {
    static_assert(Shape::kDqStages == 1);
    constexpr int kBlockBytes = kDqRows * 8 * 4, kOfChunk = kChunkColumns / 8;
    BarrierWait(base + Shape::kDqFree + group * 8, step % 2 ^ 1);
    char* const to = Base::shared + Shape::kDq + group * Shape::kDqBytes + thread * 16;
    char* const to_chunk = to + group * (kDqSums / 4 - kOfChunk) * kBlockBytes;
    char* const to_half = to + (1 - group) * kOfChunk * kBlockBytes;
#pragma unroll
    for (int n = 0; n < kDqSums / 4; ++n) {
      char* const block =
          n < kOfChunk ? to_chunk + n * kBlockBytes : to_half + (n - kOfChunk) * kBlockBytes;
      *reinterpret_cast<float4*>(block) =
          make_float4(dq[n * 4], dq[n * 4 + 1], dq[n * 4 + 2], dq[n * 4 + 3]);
    }
    FenceAsync();
    BarrierArrive(base + Shape::kDqFull + group * 8);
  }

  // dS = P (dP - delta), all but dP packed.
  __device__ __forceinline__ void Slopes(Packed<kScores>& ds, Packed<kScores>& weights,
                                         const float (&dp)[kScores], const float* delta,
                                         bool masked) const {
#pragma unroll
    for (int n = 0; n < kScores / 4; ++n) {
      const float2 d = RowPair(delta, n, thread);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = n * 4 + h * 2;
        uint32_t& packed = weights[n / 2][n % 2 * 2 + h];
        asm volatile("" : "+r"(packed));  // there are no registers to unpack it earlier
        ds[n / 2][n % 2 * 2 + h] = PackSlopes<T>(packed, dp[i] - d.x, dp[i + 1] - d.y, masked);
      }
    }
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
      Base::template KeysByQueries<KeyTile, QueryTile>(c, Base::OwnRows(Shape::kK),
                                                       q + query * kChunkRowBytes);
      WgmmaCommit();
      WgmmaWait<0>();
      KeepAfter(c);
      const BackwardScores<T, kCount, kPlain, Shape::kCapped> scores{
          p,      owned().sequence, owned().first_key + group * 64, at.first + query, at.head,
          thread, at.flags};
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
    constexpr int kStages = Shape::kStages;
    const bool has_dq = p.dq_accum != nullptr;
    float dk[KeyTile::kDim / 2], dv[ValueTile::kDim / 2];
#pragma unroll
    for (int i = 0; i < KeyTile::kDim / 2; ++i) dk[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < ValueTile::kDim / 2; ++i) dv[i] = 0.0f;

    int step = 0;
    BarrierWait(base + Shape::kQFull, 0);
    int flags = StepAt(0).flags;
    if (!(flags & Step::kEnd)) Base::TakeKeys();
    for (; !(flags & Step::kEnd); ++step) {
      const int stage = step % kStages, phase = step / kStages % 2;
      const uint32_t q = base + Shape::kQ + stage * QueryTile::kBytes;
      const uint32_t d_o = base + Shape::kDo + stage * GradTile::kBytes;
      const Step& at = StepAt(step);
      const bool masked = flags & Step::kMasked;
      if (flags & Step::kPartial) Base::ClearStrangers(at.first, stage, phase);

      // S and P; with options dV, or P and what dS is made of would both have to wait.
      Packed<kScores> prob, weights;
      Probabilities(prob, weights, at, q, Base::LseOf(stage));
      BarrierWait(base + Shape::kDoFull + stage * 8, phase);
      if constexpr (!kPlain) {
        WgmmaFence();
        Base::template SumOverQueries<GradTile>(dv, prob, d_o);
        WgmmaCommit();
        WgmmaWait<0>();
        KeepAfter(dv);
      }

      // dP and dS.
      float dp[kScores];
      WgmmaFence();
      Base::template KeysByQueries<ValueTile, GradTile>(dp, Base::OwnRows(Shape::kV), d_o);
      WgmmaCommit();
      WgmmaWait<0>();
      KeepAfter(dp);
      Packed<kScores> ds;
      Slopes(ds, weights, dp, Base::DeltaOf(stage), masked);
      // Both have read the dS before.
      if (step > 0) BarrierWait(base + Shape::kScoresReady, (step - 1) % 2);
      StoreTransposed<ScoreTile>(base + Shape::kDs, 0, group * 64, thread, ds);

      // dV, under which dS becomes visible; dQ, once dV's operand is gone; dK.
      if constexpr (kPlain) {
        WgmmaFence();
        Base::template SumOverQueries<GradTile>(dv, prob, d_o);
        WgmmaCommit();
      }
      FenceAsync();
      BarrierMeet(kWorkersMeet, Shape::kWorkers);
      WgmmaWait<0>();
      KeepAfter(dv);
      Arrive(base + Shape::kDoFree + stage * 8);
      float dq[kDqSums];
      WgmmaFence();
      SumOverKeys(dq);
      WgmmaCommit();
      WgmmaFence();
      SumSlopes(dk, q);
      WgmmaCommit();

      // What comes next is looked at while the products run.
      BarrierWait(base + Shape::kQFull + (step + 1) % kStages * 8, (step + 1) / kStages % 2);
      flags = StepAt(step + 1).flags;

      // dQ goes out under dK.
      WgmmaWait<1>();
      KeepAfter(dq);
      Arrive(base + Shape::kScoresReady);
      if (has_dq) HandOver(dq, step);
      WgmmaWait<0>();
      BarrierArrive(base + Shape::kQFree + stage * 8);
    }

    WgmmaWait<0>();
    KeepAfter(dk);
    KeepAfter(dv);

    // dV and dK go out by way of this warpgroup's rows of V and K. Packed, the rows after the last
    // of a sequence are another's, which boxes would overwrite.
    const bool boxes = p.cu_q == nullptr || owned().first_key + kKeys <= owned().sequence.kv_rows;
    StoreAccumulators<T, ValueTile>(base + Shape::kV, group * 64, 0, thread, dv, 1.0f);
    FenceAsync();
    BarrierMeet(kWarpgroupMeets + group, kWarpgroup);
    if (boxes && thread == 0) Base::template StoreRows<ValueTile>(maps.dv, base + Shape::kV);
    BarrierMeet(kWorkersMeet, Shape::kWorkers);  // nobody reads K any more
    StoreAccumulators<T, KeyTile>(base + Shape::kK, group * 64, 0, thread, dk, p.scale);
    FenceAsync();
    BarrierMeet(kWarpgroupMeets + group, kWarpgroup);
    if (boxes && thread == 0) Base::template StoreRows<KeyTile>(maps.dk, base + Shape::kK);
    if (boxes) {
      if (thread == 0) WaitStoresRead<0>();
    } else {
      BarrierMeet(kWorkersMeet, Shape::kWorkers);
      Base::StoreKeys();
    }
  }
};

}  // namespace kvblock::hopper
