// What a consumer of Hopper's forward kernel (kernel.cuh) does in place of maxima
// (Consumer::kTrusts): it keeps a tile's sums, and looks at them when the tensor cores are busy.
#pragma once

#include "device/mbarrier.cuh"
#include "device/wgmma.cuh"
#include "ops/attention/hopper/forward/consumer.cuh"
#include "ops/attention/hopper/forward/result.cuh"
#include "ops/attention/hopper/forward/rows.cuh"
#include "ops/attention/hopper/forward/scores_again.cuh"

namespace kvblock::hopper {

// Behind an item's first maxima. Rows that are not the item's (another sequence's, that came
// along with the copy) get a reference that makes nothing of all their scores: what they hold
// must not decide how this warp computes its own.
template <typename Traits>
__device__ __forceinline__ void Consumer<Traits>::BeginTrust(const Item& item, int flags,
                                                             RowSums& sums) {
  if constexpr (!Traits::kDense) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = FirstRow() + half * 8 + Lane() / 4;
      const int query = PlaceOf<Traits>(p_, item, row).query;
      const bool own = IsAmong<Traits>(item, row, query, item.sequence.q_len);
      if (!own) sums.reference[half] = INFINITY;
    }
  }
  grows_ = false;
  NoteTrust(flags, sums);
}
// Behind maxima: whether the next tile does without. Not where masks left a row without a
// reference, nor where a row of the item has outgrown one.
template <typename Traits>
__device__ __forceinline__ void Consumer<Traits>::NoteTrust(int flags, const RowSums& sums) {
  trusts_ = !grows_ && !((flags & Step::kMasked) && AnyUnset(sums));
}

// What a tile's probabilities sum to joins the sums, now or in TakeSums.
template <typename Traits>
__device__ __forceinline__ void Consumer<Traits>::KeepSums(Rows<Traits>& rows,
                                                           const float (&factor)[2],
                                                           const float (&sum)[2][2],
                                                           float (&tile)[2]) const {
  if constexpr (kTrusts) {
    tile[0] = sum[0][0] + sum[0][1];
    tile[1] = sum[1][0] + sum[1][1];
    KeepAfter(tile);  // summed here, not where the sums are needed
  } else {
    AddSums(rows, factor, sum);
  }
}

// The sums of the tile whose product with V comes next. The tensor cores are busy by now, which
// hides the question whether a row has outgrown its reference. If so, this warp looks at maxima
// until its item ends. That tile's step was kept until here, since ComputeAgain needs it.
template <typename Traits>
__device__ __forceinline__ void Consumer<Traits>::TakeSums(const Item& item, Rows<Traits>& rows,
                                                           float (&tile)[2]) {
  const StageCount<kSteps> step = steps_.Before();
  if (__builtin_expect(Outgrew(tile, kOutgrownByMuch), false)) {
    if (Outgrew(tile, kOutgrownByFar)) ComputeAgain(item, step.stage, rows, tile);
    grows_ = true;
    trusts_ = false;
  }
  BarrierArrive(SharedAddress(&shared_.step_empty[step.stage]));
  rows.sums.sum[0] += tile[0];
  rows.sums.sum[1] += tile[1];
}

// The probabilities of a tile once more, with new references for rows that need some; `tile` is
// what they sum to. It takes as long as some tiles do.
template <typename Traits>
__device__ __forceinline__ void Consumer<Traits>::ComputeAgain(const Item& item, int step,
                                                               Rows<Traits>& rows,
                                                               float (&tile)[2]) {
  WgmmaWait<0>();
  KeepAfter(rows.s());
  volatile float next[kColumns * 4];  // the next tile's scores, in local memory
#pragma unroll
  for (int i = 0; i < kColumns * 4; ++i) next[i] = rows.s()[i];
  ScoresAgain<Traits>(p_, item, FirstRow(), shared_.steps[step].first, Lane(), rows);
  const int flags = shared_.steps[step].flags;
  Finish(item, flags, step, rows);
  float factor[2], sum[2][2] = {};
  if (Follow(flags, rows, factor)) Rescale<Traits>(rows, factor);
  Exponentials<0, kColumns>(rows, exponent_, sum);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows.sums.sum[half] *= factor[half];
    tile[half] = sum[half][0] + sum[half][1];
  }
  TakeDroppedKeys(step);  // once more, so that nobody keeps them
  PackRows(rows);
#pragma unroll
  for (int i = 0; i < kColumns * 4; ++i) rows.s()[i] = next[i];
}

}  // namespace kvblock::hopper
