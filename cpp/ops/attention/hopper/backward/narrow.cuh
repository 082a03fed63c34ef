// A warpgroup of the Hopper backward kernel that owns 64 keys and all columns of their dK and dV.
//
// With tall tiles a step has 80 queries, so that what a step costs besides its products, and K and
// V that are read for it, serve a quarter more. Its dQ is then transposed, because the rows of a
// product are 64.
#pragma once

#include <cstdint>

#include "device/opaque.cuh"
#include "ops/attention/hopper/backward/worker.cuh"

namespace kvblock::hopper {

template <typename T, typename Shape, bool kPlain>
struct NarrowWorker : BackwardWorker<T, Shape, kPlain> {
  using Base = BackwardWorker<T, Shape, kPlain>;
  using Base::Arrive, Base::owned, Base::StepAt;
  using Base::kQueries, Base::kKeys, Base::p, Base::maps, Base::base, Base::group, Base::thread;
  using typename Base::GradTile, typename Base::KeyTile, typename Base::QueryTile;
  using typename Base::ScoreTile, typename Base::Step, typename Base::ValueTile;
  static constexpr int kDim = Shape::kDim, kScores = kQueries / 2, kSums = kDim / 2;
  using Scores = BackwardScores<T, kScores, kPlain, Shape::kCapped>;
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
  // Whether lse and delta are held in registers; interleaved, each block reads its own.
  static constexpr bool kHoldsRows = !kInterleaves && kQueries < 128 && !Shape::kCapped;
  // Whether there are registers for V, too, which products then need not read with every step.
  static constexpr bool kHoldsValues = kInterleaves && kDim == 64;

  // This warpgroup's part of dQ = dS K, or of dQ^T = K^T dS^T.
  __device__ __forceinline__ void SumOverKeys(float (&d)[kDqSums], uint32_t ds) const {
    if constexpr (kTall) {
      const uint64_t a = SharedOperand(base + Shape::kK + group * KeyTile::kChunkBytes);
      const uint64_t b = SharedOperand(ds);
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) {
        Wgmma<kQueries>::template Shared<T, OperandLies::kDown, OperandLies::kAcross>(
            d, Advance(a, k * 16 * kChunkRowBytes),
            Advance(b, k / 4 * ScoreTile::kChunkBytes + k % 4 * 32), k > 0);
      }
      return;
    }
    const uint64_t a = SharedOperand(ds + (kHalfTheQueries ? group * 64 * kChunkRowBytes : 0));
    const uint64_t b =
        SharedOperand(base + Shape::kK + (kHalfTheQueries ? 0 : group * KeyTile::kChunkBytes),
                      KeyTile::kChunkBytes);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      Wgmma<kDqColumns>::template Shared<T, OperandLies::kAcross, OperandLies::kDown>(
          d, Advance(a, k / 4 * ScoreTile::kChunkBytes + k % 4 * 32),
          Advance(b, k * 16 * kChunkRowBytes), k > 0);
    }
  }

  __device__ __forceinline__ uint32_t DsOf(int step) const {
    return base + Shape::kDs + step % 2 * ScoreTile::kBytes;
  }
  __device__ __forceinline__ auto Rows(const float* rows) const {
    if constexpr (kHoldsRows) {
      return HeldRows<kScores>(rows, thread);
    } else {
      return rows;
    }
  }

  // P and dS of a step whose S is there and whose dP is under way: both packed, dS also stored,
  // needed or not.
  //
  // Exponentials bind it, and other arithmetic fits between them. So only kRaised blocks of 8
  // queries are P before dP is awaited, and kExponents its exponents; each further block is while
  // an earlier one becomes dS and is stored.
  __device__ __forceinline__ void Slopes(const Scores& scores, Packed<kScores>& prob,
                                         Packed<kScores>& ds, float (&c)[kScores],
                                         float (&dp)[kScores], const float* lse, const float* delta,
                                         uint32_t to, bool masked) const {
    constexpr int kBlocks = kScores / 4, kExponents = 4, kRaised = 2, kAhead = 3;
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
    const uint32_t at = TransposedAt<ScoreTile>(to, 0, group * 64, thread);
    float2 d[kBlocks];  // loaded ahead: a load never moves up over a store
#pragma unroll
    for (int n = 0; n < kAhead; ++n) d[n] = RowPair(delta, n, thread);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      if (n + kExponents < kBlocks) scores.Exponents(c, lse, n + kExponents, 1);
      if (n + kRaised < kBlocks) scores.Raise(c, n + kRaised, 1);
      if (n + kAhead < kBlocks) d[n + kAhead] = RowPair(delta, n + kAhead, thread);
      scores.PackBlock(prob, ds, c, dp, d[n], n);
      if (n % 2 == 1) StoreTransposes(at + n / 2 * 16 * kChunkRowBytes, ds[n / 2]);
    }
  }

  // Leaves the dQ of a step to the warp that adds it (adder.cuh).
  __device__ __forceinline__ void HandOver(const float (&dq)[kDqSums], int step) const {
    const int place = step % Shape::kDqStages * 2 + group;
    BarrierWait(base + Shape::kDqFree + place * 8, step / Shape::kDqStages % 2 ^ 1);
    char* const to = Base::shared + Shape::kDq + place * Shape::kDqBytes + thread * 16;
#pragma unroll
    for (int n = 0; n < kDqSums / 4; ++n) {
      *reinterpret_cast<float4*>(to + n * (kWarpgroup * 16)) =
          make_float4(dq[n * 4], dq[n * 4 + 1], dq[n * 4 + 2], dq[n * 4 + 3]);
    }
    FenceAsync();
    BarrierArrive(base + Shape::kDqFull + place * 8);
  }

  // Whether no query of a step sees a key of this warpgroup.
  __device__ __forceinline__ bool IsUnseen(const Step& at) const {
    const int key = owned().first_key + group * 64;
    int low, high;
    owned().sequence.VisibleKeys(at.first, at.first + kQueries, &low, &high);
    return key + 64 <= low || key >= high;
  }
  // A step of whose queries none sees this warpgroup's keys: of its products only dQ is left, whose
  // other keys are the other warpgroup's. Returns the next flags.
  __device__ __forceinline__ int RunUnseen(int step) const {
    constexpr int kStages = Shape::kStages;
    const int stage = step % kStages;
    const bool has_dq = p.dq_accum != nullptr;
    if (has_dq) {
      const Packed<kScores> ds = {};
      StoreTransposed<ScoreTile>(DsOf(step), 0, group * 64, thread, ds);
      FenceAsync();
    }
    BarrierMeet(kWorkersMeet, Shape::kWorkers);
    float dq[kDqSums];
    WgmmaFence();
    SumOverKeys(dq, DsOf(step));
    WgmmaCommit();
    BarrierWait(base + Shape::kDoFull + stage * 8, step / kStages % 2);
    Arrive(base + Shape::kDoFree + stage * 8);
    WgmmaWait<0>();
    KeepAfter(dq);
    if (has_dq) HandOver(dq, Opaque(step));  // or both share addresses, and others spill
    BarrierArrive(base + Shape::kQFree + stage * 8);
    BarrierWait(base + Shape::kQFull + (step + 1) % kStages * 8, (step + 1) / kStages % 2);
    return StepAt(step + 1).flags;
  }

  __device__ __forceinline__ void Run() const {
    constexpr int kStages = Shape::kStages;
    const bool has_dq = p.dq_accum != nullptr;
    float dk[kSums], dv[kSums], dq[kDqSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) dk[i] = dv[i] = 0.0f;

    int step = 0;
    BarrierWait(base + Shape::kQFull, 0);
    int flags = StepAt(0).flags;
    if (!(flags & Step::kEnd)) Base::TakeKeys();
    Packed<kDim / 2> values;  // this warpgroup's rows of V
    if constexpr (kHoldsValues) {
      LoadPacked<ValueTile>(base + Shape::kV, group * 64, 0, thread, values);
    }
    for (; !(flags & Step::kEnd); ++step) {
      const int stage = step % kStages, phase = step / kStages % 2;
      const uint32_t q = base + Shape::kQ + stage * QueryTile::kBytes;
      const uint32_t d_o = base + Shape::kDo + stage * QueryTile::kBytes;
      const Step& at = StepAt(step);
      const bool masked = flags & Step::kMasked;
      if (flags & Step::kPartial) Base::ClearStrangers(at.first, stage, phase);
      if constexpr (kSkipsUnseen) {
        if (masked && IsUnseen(at)) {
          flags = RunUnseen(step);
          continue;
        }
      }

      // S and dP.
      const auto lse = Rows(Base::LseOf(stage));
      float c[kScores], dp[kScores];
      WgmmaFence();
      Base::template KeysByQueries<KeyTile, QueryTile>(c, Base::OwnRows(Shape::kK), q);
      WgmmaCommit();
      BarrierWait(base + Shape::kDoFull + stage * 8, phase);
      if constexpr (kHoldsValues) {
        Base::template KeysByQueries<GradTile>(dp, values, d_o);
      } else {
        Base::template KeysByQueries<ValueTile, GradTile>(dp, Base::OwnRows(Shape::kV), d_o);
      }
      WgmmaCommit();

      // P, under dP; dS.
      WgmmaWait<1>();
      KeepAfter(c);
      const Scores scores{
          p, owned().sequence, owned().first_key + group * 64, at.first, at.head, thread, flags};
      Packed<kScores> prob, ds;
      if constexpr (kInterleaves) {
        Slopes(scores, prob, ds, c, dp, lse, Base::DeltaOf(stage), DsOf(step), masked);
      } else {
        if constexpr (kTall) {
          scores.PlainProbabilities(c, lse, masked);
        } else {
          scores.Probabilities(prob, c, lse, masked);
        }
        const auto delta = Rows(Base::DeltaOf(stage));
        WgmmaWait<0>();
        KeepAfter(dp);
        if constexpr (kTall) {  // P is packed last: there are no registers for it beside P and dP
          scores.Slopes(dp, c, dp, delta, masked);
          PackAll<T>(ds, dp);
        } else {
          scores.Slopes(c, dp, delta, masked);
          PackAll<T>(ds, c);
        }
        if (has_dq) StoreTransposed<ScoreTile>(DsOf(step), 0, group * 64, thread, ds);
      }

      if constexpr (kTall) {
        KeepAfter(c);
        PackAll<T>(prob, c);
      }

      // dV, under which dS becomes visible; dQ; dK, under which dQ goes out.
      WgmmaFence();
      Base::template SumOverQueries<GradTile>(dv, prob, d_o);
      WgmmaCommit();
      if (has_dq) FenceAsync();
      BarrierMeet(kWorkersMeet, Shape::kWorkers);
      WgmmaFence();
      SumOverKeys(dq, DsOf(step));
      WgmmaCommit();
      WgmmaWait<1>();
      Arrive(base + Shape::kDoFree + stage * 8);
      WgmmaFence();
      Base::template SumOverQueries<QueryTile>(dk, ds, q);
      WgmmaCommit();

      // What comes next is looked at while the products run.
      BarrierWait(base + Shape::kQFull + (step + 1) % kStages * 8, (step + 1) / kStages % 2);
      flags = StepAt(step + 1).flags;

      WgmmaWait<1>();
      KeepAfter(dq);
      if (has_dq) HandOver(dq, step);
      WgmmaWait<0>();
      BarrierArrive(base + Shape::kQFree + stage * 8);
    }

    KeepAfter(dk);
    KeepAfter(dv);

    // dV and dK go out by way of this warpgroup's rows of V and K. Packed, the rows after the last
    // of a sequence are another's, which boxes would overwrite.
    const bool boxes = p.cu_q == nullptr || owned().first_key + kKeys <= owned().sequence.kv_rows;
    const auto store = [&](const CUtensorMap& map, uint32_t tile, const float (&sums)[kSums],
                           float scale) {
      StoreAccumulators<T, KeyTile>(tile, group * 64, 0, thread, sums, scale);
      FenceAsync();
      BarrierMeet(kWarpgroupMeets + group, kWarpgroup);
      if (boxes && thread == 0) Base::template StoreRows<KeyTile>(map, tile);
    };
    store(maps.dv, base + Shape::kV, dv, 1.0f);
    BarrierMeet(kWorkersMeet, Shape::kWorkers);  // nobody reads K any more
    store(maps.dk, base + Shape::kK, dk, p.scale);
    if (boxes) {
      if (thread == 0) WaitStoresRead<0>();
    } else {
      BarrierMeet(kWorkersMeet, Shape::kWorkers);
      Base::StoreKeys();
    }
  }
};

}  // namespace kvblock::hopper
