// A consumer of Hopper's forward kernel (kernel.cuh) in 8 bits: the order of products, codes and
// barriers.
#pragma once

#include "device/mbarrier.cuh"
#include "device/wgmma.cuh"
#include "ops/attention/hopper/forward/consumer.cuh"
#include "ops/attention/hopper/forward/narrow_rows.cuh"

namespace kvblock::hopper {

// The step's flags; what its scores are multiplied by becomes exponent_. Before the products, as it
// takes a while.
template <typename Traits>
__device__ __forceinline__ int Consumer<Traits>::TakeStep() {
  exponent_.to_log2 = shared_.narrow.to_log2[steps_.stage];
  return shared_.steps[steps_.stage].flags;
}

// As Compute. P V of tile j - 1 comes first, so that P is free for the codes of tile j. P V is
// summed over kSummedTiles tiles and then added to O, while the tensor cores work on Q K(j).
template <typename Traits>
__device__ __forceinline__ const typename Traits::Item* Consumer<Traits>::ComputeNarrow(
    const Item* item, Rows<Traits>& rows) {
  BarrierWait(SharedAddress(&shared_.k_full[keys_.stage]), keys_.phase);
  if constexpr (Traits::kPaged) FenceRows();
  BeginScores(rows);
  WgmmaFence();
  IssueScores<Traits>(rows, QueriesOperand(), KeysOperand());
  WgmmaCommit();
  int flags = TakeStep();
  WgmmaWait<0>();
  KeepAfter(rows.s());
  Finish(*item, flags, steps_.stage, rows);
  LeaveScores(flags);
  FollowingCodes(rows, exponent_, true);

  const Item* next = item;
  bool keys_there = false, values_there = false;  // of the next products
  int summed = 0;                                 // tiles in the product
#pragma unroll 1
  for (;;) {
    const bool ends = flags & Step::kLast;  // the pending product is its item's last
    if (ends) {
      next = NextItem();
      if (!__any_sync(~0u, next->is == Item::kTiles)) break;
    }
    const Stage values = keys_.Before();
    if (!keys_there) BarrierWait(SharedAddress(&shared_.k_full[keys_.stage]), keys_.phase);
    if (!values_there) AwaitValues(values);
    if constexpr (Traits::kPaged) FenceRows();
    flags = TakeStep();
    BeginScores(rows);
    if (Traits::kTiles.turns) WaitTurn();
    Pin(rows);
    WgmmaFence();
    IssueValues<Traits>(rows, ValuesOperand(values), summed == 0);
    WgmmaCommit();
    IssueScores<Traits>(rows, QueriesOperand(), KeysOperand());
    WgmmaCommit();
    if (Traits::kTiles.turns) PassTurn();
    WgmmaWait<1>();
    Pin(rows);
    LeaveKeys(&shared_.v_empty[values.stage]);
    // To ask takes a while, which Q K hides.
    keys_there = IsThere(shared_.k_full, keys_.After());
    values_there = IsThere(shared_.v_full, keys_);
    if (++summed == kSummedTiles || ends) {
      AddProduct(rows);
      summed = 0;
    }
    if (ends) {
      WriteItem(*item, rows.sums, rows);
      ClearOutput(rows);
      rows.sums = RowSums();
      item = next;
    }
    WgmmaWait<0>();
    KeepAfter(rows.s());
    Finish(*item, flags, steps_.stage, rows);
    LeaveScores(flags);
    FollowingCodes(rows, exponent_, ends);
  }
  const Stage values = keys_.Before();
  AwaitValues(values);
  Pin(rows);
  WgmmaFence();
  IssueValues<Traits>(rows, ValuesOperand(values), summed == 0);
  WgmmaCommit();
  WgmmaWait<0>();
  Pin(rows);
  AddProduct(rows);
  LeaveKeys(&shared_.v_empty[values.stage]);
  WriteItem(*item, rows.sums, rows);
  return next;
}

}  // namespace kvblock::hopper
