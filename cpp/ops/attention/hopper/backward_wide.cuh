// A warpgroup of the Hopper backward kernel that owns a half of the columns of dK and dV, for head
// dims of which dK and dV would not fit otherwise.
//
// The two share the 64 keys of the CTA. Each computes the scores of 32 of the 64 queries, and both
// need all of P and dS, which therefore pass through shared memory:
//
//   S^T, dP^T  [64 keys, 32 queries]   from K, V and rows of Q, dO
//   dQ         [64 queries, columns]   dS K           added to dq_accum under what follows
//   dV, dK     [64 keys, columns]      P^T dO, dS^T Q
//
// kGroup 0 has the first chunks of 64 columns of dK and dQ, the larger half of an odd number of
// chunks; for dV it is the smaller half.
#pragma once

#include <cstdint>

#include "ops/attention/hopper/backward_worker.cuh"

namespace kvblock::hopper {

template <typename T, typename Shape, bool kPlain, int kGroup>
struct WideWorker : BackwardWorker<T, Shape, kPlain> {
  using Base = BackwardWorker<T, Shape, kPlain>;
  using Base::Arrive, Base::owned, Base::StepAt;
  using Base::kQueries, Base::kKeys, Base::p, Base::base, Base::thread;
  using typename Base::GradTile, typename Base::KeyTile, typename Base::QueryTile;
  using typename Base::ScoreTile, typename Base::Step, typename Base::ValueTile;
  static constexpr int kMyQueries = kQueries / 2, kScores = kMyQueries / 2;

  template <int kChunks, int kOfFirst>
  struct Half {
    static constexpr int kFirst = kGroup == 0 ? 0 : kOfFirst;  // chunk
    static constexpr int kColumns = (kGroup == 0 ? kOfFirst : kChunks - kOfFirst) * kChunkColumns;
    static constexpr int kSums = kColumns / 2;
  };
  using MyKeys = Half<KeyTile::kChunks, (KeyTile::kChunks + 1) / 2>;
  using MyValues = Half<ValueTile::kChunks, ValueTile::kChunks / 2>;

  // D = K Q^T or V dO^T.
  template <typename A, typename B>
  __device__ __forceinline__ void KeysByQueries(float (&d)[kScores], uint32_t keys,
                                                uint32_t queries) const {
    const uint64_t a = SharedOperand(keys);
    const uint64_t b = SharedOperand(queries + kGroup * kMyQueries * kChunkRowBytes);
#pragma unroll
    for (int k = 0; k < A::kDim / 16; ++k) {
      Wgmma<kMyQueries>::template Shared<T>(d, Advance(a, k / 4 * A::kChunkBytes + k % 4 * 32),
                                            Advance(b, k / 4 * B::kChunkBytes + k % 4 * 32), k > 0);
    }
  }

  // D (+)= A B: A is P or dS, B a tile whose rows are summed over.
  template <typename Mine, typename B, OperandLies kA>
  __device__ __forceinline__ void Sum(float (&d)[Mine::kSums], uint32_t scores, uint32_t rows,
                                      bool accumulate) const {
    constexpr int kStepA = kA == OperandLies::kAcross ? 32 : 16 * kChunkRowBytes;
    const uint64_t a = SharedOperand(scores);
    const uint64_t b = SharedOperand(rows + Mine::kFirst * B::kChunkBytes, B::kChunkBytes);
#pragma unroll
    for (int k = 0; k < 64 / 16; ++k) {
      Wgmma<Mine::kColumns>::template Shared<T, kA, OperandLies::kDown>(
          d, Advance(a, k * kStepA), Advance(b, k * 16 * kChunkRowBytes), accumulate || k > 0);
    }
  }

  __device__ __forceinline__ void Run() const {
    constexpr int kStages = Shape::kStages;
    constexpr uint32_t kP = Shape::kDs, kDs = Shape::kDs + ScoreTile::kBytes;
    const bool has_dq = p.dq_accum != nullptr;
    float dk[MyKeys::kSums], dv[MyValues::kSums];
#pragma unroll
    for (int i = 0; i < MyKeys::kSums; ++i) dk[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < MyValues::kSums; ++i) dv[i] = 0.0f;

    int step = 0;
    for (;; ++step) {
      const int stage = step % kStages, phase = step / kStages % 2;
      const uint32_t q = base + Shape::kQ + stage * QueryTile::kBytes;
      const uint32_t d_o = base + Shape::kDo + stage * GradTile::kBytes;
      BarrierWait(base + Shape::kQFull + stage * 8, phase);
      const Step& at = StepAt(step);
      const int flags = at.flags;
      if (flags & Step::kEnd) break;
      if (step == 0) Base::TakeKeys();
      if (flags & Step::kPartial) Base::ClearStrangers(at.first, stage, phase);

      // S and dP.
      float c[kScores], dp[kScores];
      WgmmaFence();
      KeysByQueries<KeyTile, QueryTile>(c, base + Shape::kK, q);
      WgmmaCommit();
      BarrierWait(base + Shape::kDoFull + stage * 8, phase);
      KeysByQueries<ValueTile, GradTile>(dp, base + Shape::kV, d_o);
      WgmmaCommit();

      // P. With S everything before it is done.
      WgmmaWait<1>();
      KeepAfter(c);
      if (step > 0) {
        Arrive(base + Shape::kScoresFree);
        BarrierArrive(base + Shape::kQFree + (step - 1) % kStages * 8);
        if (thread % 32 == 0) BarrierArrive(base + Shape::kDoFree + (step - 1) % kStages * 8);
      }
      constexpr int kMine = kGroup * kMyQueries;
      const BackwardScores<T, kScores, kPlain> scores{
          p, owned().sequence, owned().first_key, at.first + kMine, at.head, thread};
      Packed<kScores> prob, ds;
      scores.Probabilities(prob, c, Base::LseOf(stage) + kMine, flags & Step::kMasked);
      if (step > 0) BarrierWait(base + Shape::kScoresFree, (step - 1) % 2);
      StorePacked<ScoreTile>(base + kP, 0, kMine, thread, prob);

      // dS.
      WgmmaWait<0>();
      KeepAfter(dp);
      scores.Slopes(c, dp, Base::DeltaOf(stage) + kMine, flags & Step::kMasked);
      PackAll<T>(ds, c);
      StorePacked<ScoreTile>(base + kDs, 0, kMine, thread, ds);
      FenceAsync();
      Arrive(base + Shape::kScoresReady);
      BarrierWait(base + Shape::kScoresReady, step % 2);

      // dQ, dV, dK.
      float dq[MyKeys::kSums];
      WgmmaFence();
      Sum<MyKeys, KeyTile, OperandLies::kDown>(dq, base + kDs, base + Shape::kK, false);
      WgmmaCommit();
      Sum<MyValues, GradTile, OperandLies::kAcross>(dv, base + kP, d_o, true);
      Sum<MyKeys, QueryTile, OperandLies::kAcross>(dk, base + kDs, q, true);
      WgmmaCommit();
      WgmmaWait<1>();
      KeepAfter(dq);
      if (has_dq) {
        Base::AwaitTurn(step);
        Base::AddDq(dq, at.head, at.first, MyKeys::kFirst * 8);
        Base::PassTurn();
      }
    }

    WgmmaWait<0>();
    KeepAfter(dk);
    KeepAfter(dv);
    BarrierMeet(kWorkersMeet, Shape::kWorkers);  // nobody reads K any more
    StoreAccumulators<T, KeyTile>(base + Shape::kK, 0, MyKeys::kFirst * kChunkColumns, thread, dk,
                                  p.scale);
    StoreAccumulators<T, ValueTile>(base + Shape::kV, 0, MyValues::kFirst * kChunkColumns, thread,
                                    dv, 1.0f);
    BarrierMeet(kWorkersMeet, Shape::kWorkers);
    Base::StoreKeys();
  }
};

}  // namespace kvblock::hopper
