// A warpgroup of the Hopper backward kernel that owns 64 keys and all columns of their dK and dV.
//
// With tall tiles a step has 80 queries, so that what a step costs besides its products, and K and
// V that are read for it, serve a quarter more. Its dQ is then transposed, because the rows of a
// product are 64.
#pragma once

#include <cstdint>

#include "device/opaque.cuh"
#include "ops/attention/hopper/backward/own_keys.cuh"

namespace kvblock::hopper {

template <typename T, typename Shape, bool kPlain>
struct SplitKeysWorker {
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  using QueryTile = typename Shape::QueryTile;
  using GradTile = typename Shape::GradTile;
  using ScoreTile = typename Shape::ScoreTile;
  using Step = BackwardStep;
  static constexpr int kQueries = Shape::kQueries, kKeys = Shape::kKeys;
  static constexpr int kDim = Shape::kDim, kScores = kQueries / 2, kSums = kDim / 2;
  using Scores = BackwardScores<T, kScores, kPlain, Shape>;
  static_assert(Shape::kValueDim == kDim);

  // Of dQ it computes all columns of its half of the queries, or 64 columns; of a tall tile, whose
  // queries no 64 divide, these 64 columns transposed.
  static constexpr bool kHalfTheQueries = kQueries == 128, kTall = Shape::kTall;
  static constexpr int kDqColumns = kTall ? kQueries : kHalfTheQueries ? kDim : 64;
  static constexpr int kDqSums = kDqColumns / 2;
  static_assert(kHalfTheQueries || kDim == 128 || (kDim == 96 && !kTall));
  // Whether a warpgroup passes over a step of whose queries none sees its keys. Of the longer walks
  // over tall tiles such steps are too few to pay for the branch.
  static constexpr bool kSkipsUnseen = kPlain && kQueries == 64;
  // Whether P becomes dS block by block, while other blocks become P. A tall tile has no registers
  // for that.
  static constexpr bool kInterleaves = kPlain && !kTall;
  // Interleaved, of so many blocks the exponents are there before dP is awaited.
  static constexpr int kExponents = 4;
  // Whether lse of these is read before S is issued, while shared memory is not yet busy with
  // products. D64 gains nothing; D96 was not measured.
  static constexpr bool kReadsEarly = kInterleaves && kDim == 128;
  // Whether lse and delta are held in registers; interleaved, each further block reads its own.
  static constexpr bool kHoldsRows = !kInterleaves && kQueries < 128 && !Shape::kCapped;
  // Whether there are registers for V, too, which products then need not read with every step.
  static constexpr bool kHoldsValues = kInterleaves && kDim == 64;

  const BackwardWorker<T, Shape, kPlain> w;

  // This warpgroup's part of dQ = dS K, or of dQ^T = K^T dS^T.
  __device__ __forceinline__ void SumOverKeys(float (&d)[kDqSums], uint32_t ds) const {
    const uint32_t k = w.cta.K();
    if constexpr (kTall) {
      Multiply<T, kKeys / 16>(d, Down<KeyTile>{SharedOperand(k + w.group * KeyTile::kChunkBytes)},
                              Across<ScoreTile>{SharedOperand(ds)});
    } else {
      Multiply<T, kKeys / 16>(
          d,
          Across<ScoreTile>{
              SharedOperand(ds + (kHalfTheQueries ? w.group * 64 * kChunkRowBytes : 0))},
          Down<KeyTile>{SharedOperand(k + (kHalfTheQueries ? 0 : w.group * KeyTile::kChunkBytes),
                                      KeyTile::kChunkBytes)});
    }
  }

  __device__ __forceinline__ uint32_t DsOf(int step) const { return w.cta.Ds(step % 2); }
  __device__ __forceinline__ auto Rows(const float* rows) const {
    if constexpr (kHoldsRows) {
      return HeldRows<kScores / 4>(rows, w.thread);
    } else {
      return rows;
    }
  }
  __device__ __forceinline__ auto LseOf(int stage) const {
    if constexpr (kReadsEarly) {
      return HeldRows<kExponents>(w.cta.Lse(stage), w.thread);
    } else {
      return Rows(w.cta.Lse(stage));
    }
  }

  // P and dS of a step whose S is there and whose dP is under way: both packed, dS also stored,
  // needed or not.
  //
  // Exponentials bind it, and other arithmetic fits between them. So only kRaised blocks of 8
  // queries are P before dP is awaited, and kExponents its exponents; each further block is while
  // an earlier one becomes dS and is stored.
  template <typename Lse, typename Drops>
  __device__ __forceinline__ void Slopes(const Scores& scores, Packed<kScores>& prob,
                                         Packed<kScores>& ds, float (&c)[kScores],
                                         float (&dp)[kScores], const Lse& lse, const float* delta,
                                         uint32_t to, bool masked, const Drops& drops) const {
    constexpr int kBlocks = kScores / 4, kRaised = 2, kAhead = 3;
    scores.Exponents(c, lse, 0, kExponents);
    scores.Raise(c, 0, kRaised);
    // The assembler moves a wait up over arithmetic, but not out of a branch.
    if (masked) {
      WgmmaWait<0>();
      KeepAfter(dp);
      KeepAfter(c);
      scores.MaskBoth(c, dp, kRaised, kExponents);
    } else {
      WgmmaWait<0>();
      KeepAfter(dp);
      KeepAfter(c);
    }
    const uint32_t at = TransposedAt<ScoreTile>(to, 0, w.group * 64, w.thread);
    float2 d[kBlocks];  // loaded ahead: a load never moves up over a store
#pragma unroll
    for (int n = 0; n < kAhead; ++n) d[n] = RowPair(delta, n, w.thread);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      if (n + kExponents < kBlocks) scores.Exponents(c, lse, n + kExponents, 1);
      if (n + kRaised < kBlocks) scores.Raise(c, n + kRaised, 1);
      if (n + kAhead < kBlocks) d[n + kAhead] = RowPair(delta, n + kAhead, w.thread);
      drops.DropGradBlock(dp, n);
      scores.PackBlock(prob, ds, c, dp, d[n], n);
      drops.DropBlock(prob, n);
      if (n % 2 == 1) StoreTransposes(at + n / 2 * 16 * kChunkRowBytes, ds[n / 2]);
    }
  }

  // Leaves the dQ of a step to the warp that adds it (adder.cuh).
  __device__ __forceinline__ void HandOver(const float (&dq)[kDqSums], int step) const {
    const int part = step % Shape::kDqStages * 2 + w.group;
    BarrierWait(w.cta.DqFree(part), step / Shape::kDqStages % 2 ^ 1);
    char* const to = w.cta.DqBytes(part) + w.thread * 16;
#pragma unroll
    for (int n = 0; n < kDqSums / 4; ++n) WriteBlock(to + n * kDqBlockBytes, dq, n);
    FenceAsync();
    BarrierArrive(w.cta.DqFull(part));
  }

  // Whether no query of a step sees a key of this warpgroup.
  __device__ __forceinline__ bool IsUnseen(const Step& at) const {
    const int key = w.cta.owned().first_key + w.group * 64;
    int low, high;
    w.sequence().VisibleKeys(at.first, at.first + kQueries, &low, &high);
    return key + 64 <= low || key >= high;
  }
  // A step of whose queries none sees this warpgroup's keys: of its products only dQ is left, whose
  // other keys are the other warpgroup's. Returns the next flags.
  __device__ __forceinline__ int RunUnseen(int step) const {
    const BackwardCta<Shape>& cta = w.cta;
    const int stage = step % Shape::kStages;
    const bool has_dq = cta.p.dq_accum != nullptr;
    if (has_dq) {
      const Packed<kScores> ds = {};
      StoreTransposed<ScoreTile>(DsOf(step), 0, w.group * 64, w.thread, ds);
      FenceAsync();
    }
    BarrierMeet(kWorkersMeet, Shape::kWorkers);
    float dq[kDqSums];
    WgmmaFence();
    SumOverKeys(dq, DsOf(step));
    WgmmaCommit();
    cta.AwaitGrads(stage, step / Shape::kStages % 2);
    w.LeaveGrads(stage);
    WgmmaWait<0>();
    KeepAfter(dq);
    // Opaque, or both calls share addresses, and others spill.
    if (has_dq) HandOver(dq, Opaque(step));
    cta.LeaveStep(stage);
    return w.AwaitNextFlags(step);
  }

  __device__ __forceinline__ void Run() const {
    const BackwardCta<Shape>& cta = w.cta;
    const auto& p = cta.p;
    const bool has_dq = p.dq_accum != nullptr;
    float dk[kSums], dv[kSums], dq[kDqSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) dk[i] = dv[i] = 0.0f;

    int step = 0, flags = w.AwaitFlags(0);
    if (!(flags & Step::kEnd)) w.TakeKeys();
    Packed<kDim / 2> values;  // this warpgroup's rows of V
    if constexpr (kHoldsValues) {
      LoadPacked<ValueTile>(cta.V(), w.group * 64, 0, w.thread, values);
    }
    for (; !(flags & Step::kEnd); ++step) {
      const int stage = step % Shape::kStages, phase = step / Shape::kStages % 2;
      const uint32_t q = w.cta.Q(stage), d_o = w.cta.Grads(stage);
      const Step& at = cta.StepAt(step);
      const bool masked = flags & Step::kMasked;
      if (flags & Step::kPartial) ClearQueries(w, at.first, stage, phase);
      if constexpr (kSkipsUnseen) {
        if (masked && IsUnseen(at)) {
          flags = RunUnseen(step);
          continue;
        }
      }

      // S and dP.
      const int first_key = cta.owned().first_key + w.group * 64;
      const auto drops = w.DropoutOf(first_key, at.first, at.head);
      const auto lse = LseOf(stage);
      float c[kScores], dp[kScores];
      WgmmaFence();
      w.template KeysByQueries<KeyTile, QueryTile>(c, OwnRows(w, w.cta.K()), q);
      WgmmaCommit();
      cta.AwaitGrads(stage, phase);
      if constexpr (kHoldsValues) {
        MultiplyHeld<T>(dp, values, Across<GradTile>{SharedOperand(d_o)});
      } else {
        w.template KeysByQueries<ValueTile, GradTile>(dp, OwnRows(w, w.cta.V()), d_o);
      }
      WgmmaCommit();

      // P, under dP; dS.
      WgmmaWait<1>();
      KeepAfter(c);
      const Scores scores = w.template Scores<kScores>(cta.owned().first_key + w.group * 64,
                                                       at.first, at.head, flags);
      Packed<kScores> prob, ds;
      if constexpr (kInterleaves) {
        Slopes(scores, prob, ds, c, dp, lse, w.cta.Delta(stage), DsOf(step), masked, drops);
      } else {
        if constexpr (kTall) {
          scores.PlainProbabilities(c, lse, masked);
        } else {
          scores.Probabilities(prob, c, lse, masked);
        }
        const auto delta = Rows(w.cta.Delta(stage));
        WgmmaWait<0>();
        KeepAfter(dp);
        if constexpr (kTall) {  // P is packed last: there are no registers for it beside P and dP
          scores.Slopes(dp, c, dp, delta, masked);
          PackAll<T>(ds, dp);
        } else {
          scores.Slopes(c, dp, delta, masked);
          PackAll<T>(ds, c);
        }
        if (has_dq) StoreTransposed<ScoreTile>(DsOf(step), 0, w.group * 64, w.thread, ds);
      }

      if constexpr (kTall) {
        KeepAfter(c);
        PackAll<T>(prob, c);
      }

      // dV, under which dS becomes visible; dQ; dK, under which dQ goes out.
      WgmmaFence();
      w.template SumOverQueries<GradTile>(dv, prob, d_o);
      WgmmaCommit();
      if (has_dq) FenceAsync();
      BarrierMeet(kWorkersMeet, Shape::kWorkers);
      WgmmaFence();
      SumOverKeys(dq, DsOf(step));
      WgmmaCommit();
      WgmmaWait<1>();
      w.LeaveGrads(stage);
      WgmmaFence();
      w.template SumOverQueries<QueryTile>(dk, ds, q);
      WgmmaCommit();

      flags = w.AwaitNextFlags(step);  // while the products run

      WgmmaWait<1>();
      KeepAfter(dq);
      if (has_dq) HandOver(dq, step);
      WgmmaWait<0>();
      cta.LeaveStep(stage);
    }

    KeepAfter(dk);
    KeepAfter(dv);
    StoreSums(w, dk, dv);
  }
};

}  // namespace kvblock::hopper
