// The loop that a consumer of Hopper's forward kernel (kernel.cuh) has for steps like most
// (Consumer::kSeparates): neither the first nor the last of their item, with nothing masked.
#pragma once

#include "device/mbarrier.cuh"
#include "device/wgmma.cuh"
#include "ops/attention/hopper/forward/consumer.cuh"
#include "ops/attention/hopper/forward/rows.cuh"

namespace kvblock::hopper {

// Whether a step has something that ComputeUsual does not look for. All warps of a warpgroup must
// issue a product from the same place of the program, or nothing is known of what comes of it. So
// this asks only what they all find alike: flags, and what Finish made of those before.
template <typename Traits>
__device__ __forceinline__ bool Consumer<Traits>::IsUnusual(int flags) const {
  const bool unusual = (flags & (Step::kMasked | Step::kStarts | Step::kLast)) != 0;
  // By a vote, for the compiler's uniform registers. All lanes of all warps say the same.
  return __any_sync(~0u, unusual || clear_from_ < Traits::kKeys);
}

// The steps of Compute up to the next one that is the first or the last of its item, or has
// something masked. What this warp thinks of its references is one register here, for want of two.
template <typename Traits>
__device__ __forceinline__ void Consumer<Traits>::ComputeUsual(const Item& item, bool& begins,
                                                               Rows<Traits>& rows,
                                                               float (&tile)[2]) {
  Looks looks = trusts_ ? kAtNone : grows_ ? kAtAll : kAtNext;
#pragma unroll 1
  for (;;) {
    BarrierWait(SharedAddress(&shared_.k_full[keys_.stage]), keys_.phase);
    FenceRows();
    if (IsUnusual(shared_.steps[steps_.stage].flags)) break;
    ComputeUsualStep(item, keys_.Before(), begins, looks, rows, tile);
    begins = false;
  }
  trusts_ = looks == kAtNone;
  grows_ = looks == kAtAll;
}

// One of them, with the pending product. A warp that looks at maxima, or computes a tile again,
// does so between the products, which are the same for all warps. As that hardly ever happens, it
// scales O at once, and no register is kept for it.
template <typename Traits>
__device__ __forceinline__ void Consumer<Traits>::ComputeUsualStep(const Item& item, Stage values,
                                                                   bool begins, Looks& looks,
                                                                   Rows<Traits>& rows,
                                                                   float (&tile)[2]) {
  static_assert(kSeparates);
  constexpr int kHalf = kColumns / 2;
  const Step& step = shared_.steps[steps_.stage];
  if (Traits::kTiles.turns) WaitTurn();
  Pin(rows);
  WgmmaFence();
  IssueScores<Traits>(rows, QueriesOperand(), KeysOperand());
  WgmmaCommit();
  const StageCount<kSteps> before = steps_.Before();
  if (__builtin_expect(Outgrew(tile, kOutgrownByMuch), false)) {
    if (Outgrew(tile, kOutgrownByFar)) ComputeAgain(item, before.stage, rows, tile);
    looks = kAtAll;
  }
  BarrierArrive(SharedAddress(&shared_.step_empty[before.stage]));
  rows.sums.sum[0] += tile[0];
  rows.sums.sum[1] += tile[1];
  AwaitValues(values);
  WgmmaFence();
  IssueValues<Traits>(rows, ValuesOperand(values), begins);
  WgmmaCommit();
  if (Traits::kTiles.turns) PassTurn();
  // With the tile's first key the hash of dropout begins: read early, it stands between the first
  // exponentials, where it helps head dim 64 (1.02 times as fast) and delays 128 (0.95).
  constexpr bool kEarly = Traits::kQueryDim == 64;
  int first = 0;
  if (kEarly) first = step.first;
  const bool trusts = __all_sync(~0u, looks == kAtNone);  // a vote, for uniform registers
  WgmmaWait<1>();
  KeepAfter(rows.s());
  float factor[2] = {1.0f, 1.0f};
  if (__builtin_expect(!trusts, false)) {
    if (Follow(0, rows, factor)) {
      WgmmaWait<0>();
      KeepAfter(rows.o());
      Rescale<Traits>(rows, factor);
    }
    if (looks == kAtNext) looks = kAtNone;
    rows.sums.sum[0] *= factor[0];
    rows.sums.sum[1] *= factor[1];
  }
  if (!kEarly) first = step.first;
  dropout_.TakeKeys(first, p_.dropout.least);
  LeaveScores(0);
  float sum[2][2] = {};
  Exponentials<0, kHalf>(rows, exponent_, sum);
  KeepAfter(sum[0]);
  KeepAfter(sum[1]);
  // In a loop of one round, above which the assembler does not move it (Compute has a branch
  // there).
#pragma unroll 1
  do {
    WgmmaWait<0>();
  } while (p_.num_heads < 0);
  KeepAfter(rows.o());
  LeaveKeys(&shared_.v_empty[values.stage]);
  Exponentials<kHalf, kColumns>(rows, exponent_, sum);
  KeepSums(rows, factor, sum, tile);
  PackRows(rows);
}

}  // namespace kvblock::hopper
