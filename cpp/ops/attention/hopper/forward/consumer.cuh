// A consumer of Hopper's forward kernel (kernel.cuh), a warpgroup: the order of products, softmax
// and barriers. That of 8 bits is in consumer_narrow.cuh, that of steps like most with dropout in
// consumer_usual.cuh, what is done in place of maxima in consumer_trust.cuh; who uses a consumer
// includes all four.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/cluster.cuh"
#include "device/mbarrier.cuh"
#include "device/tensor_copy.cuh"
#include "device/warpgroup.cuh"
#include "device/wgmma.cuh"
#include "ops/attention/hopper/forward/pieces.cuh"
#include "ops/attention/hopper/forward/result.cuh"
#include "ops/attention/hopper/forward/rows.cuh"
#include "ops/attention/hopper/forward/shared.cuh"

namespace kvblock::hopper {

template <typename Traits>
class Consumer {
 public:
  using Params = typename Traits::Params;
  using Item = typename Traits::Item;

  __device__ __forceinline__ Consumer(const Params& p, ForwardShared<Traits>& shared, int group)
      : p_(p), shared_(shared), group_(group) {
    rules_ = Traits::kKind == ForwardKind::kGeneral ? MakeScoreRules(p)
                                                    : ScoreRules{false, p.scale * kLog2E};
    if constexpr (!Traits::kCapped) exponent_.to_log2 = rules_.to_log2;
  }

  __device__ __forceinline__ void Run() {
    if (Traits::kTiles.turns && group_ == Traits::kConsumers - 1) PassTurn();
    const Item* item = NextItem();
    while (item->is != Item::kEnd) {
      Rows<Traits> rows;
      ClearOutput(rows);  // where there are tiles, their first product does not read it
      if (item->is == Item::kEmpty) {
        LeaveStep();
        Leave(&shared_.q_empty[queries_.stage]);
        WriteItem(*item, rows.sums, rows);
        item = NextItem();
      } else {
        if constexpr (Traits::kNarrow) {
          item = ComputeNarrow(item, rows);
        } else {
          item = Compute(item, rows);
        }
      }
    }
    if (Traits::kStagesOutput && !Traits::kJoins) {
      TakeOutput();
      LeaveOutput();
    }
  }

 private:
  using Stage = StageCount<Traits::kStages>;
  using Exponent = std::conditional_t<Traits::kCapped, SmallSoftCap, Scaled>;
  static constexpr int kColumns = Traits::kKeys / 8;  // eight keys each
  // Whether nobody looks for maxima after an item's first tile. Rows keep the reference that this
  // one gave them, and TakeSums finds those that have outgrown it. Not float16, which ends at 2^16;
  // other head dims gain nothing.
  static constexpr bool kTrusts = std::is_same_v<typename Traits::T, __nv_bfloat16> &&
                                  (Traits::kQueryDim == 64 || Traits::kQueryDim == 128) &&
                                  !Traits::kCapped && Traits::kKind != ForwardKind::kGeneral;
  // Whether steps like most have a loop of their own (ComputeUsual), so that what others need does
  // not lie between their instructions. Without dropout the limit of power hides what that gains.
  static constexpr bool kSeparates = kTrusts && Traits::kDrops;

  // Waits for the next item. Its Q is in queries_.stage.
  __device__ __forceinline__ const Item* NextItem() {
    if (items_ > 0) queries_.Advance();
    BarrierWait(SharedAddress(&shared_.q_full[queries_.stage]), queries_.phase);
    return &shared_.items[items_++ % kItems];
  }

  // Computes and writes an item, and those after it while each has KV tiles: with two places for Q,
  // the first product of an item is issued with the last of the one before. Returns the first item
  // that is not computed.
  __device__ __forceinline__ const Item* Compute(const Item* item, Rows<Traits>& rows) {
    constexpr int kHalf = kColumns / 2;
    float factor[2], sum[2][2] = {}, tile[2];
    BarrierWait(SharedAddress(&shared_.k_full[keys_.stage]), keys_.phase);
    FenceRows();
    WgmmaFence();
    IssueScores<Traits>(rows, QueriesOperand(), KeysOperand());
    WgmmaCommit();
    int flags = shared_.steps[steps_.stage].flags;
    WgmmaWait<0>();
    KeepAfter(rows.s());
    Finish(*item, flags, steps_.stage, rows);
    TakeDropout(*item, flags);
    LeaveScores(flags);
    if constexpr (Traits::kCapped) {  // there is no O to scale yet
      Follow(flags, rows, factor);
    } else if (Traits::kHasBases && HasBases(p_)) {
      MoveBases(rows, factor);
    } else {
      float max[2];
      RowMaxima(rows, max);
      MoveReferences(rows.sums, max, exponent_, factor);
    }
    if constexpr (kTrusts) BeginTrust(*item, flags, rows.sums);
    WithExponent([&](const auto& exponent) { Exponentials<0, kColumns>(rows, exponent, sum); });
    KeepSums(rows, factor, sum, tile);
    PackRows(rows);

    const Item* next = item;
    bool keys_there = false, values_there = false;  // of the next products
#pragma unroll 1
    for (;;) {
      // Whether the pending product begins its item, and ends it.
      bool begins = flags & Step::kStarts;
      const bool ends = flags & Step::kLast;
      if (ends) {
        if (Traits::kQueryStages == 1) break;
        next = NextItem();
        // By a vote, since the compiler keeps in uniform registers what depends on it then.
        if (!__any_sync(~0u, next->is == Item::kTiles)) break;
      }
      if constexpr (kSeparates) ComputeUsual(*item, begins, rows, tile);  // up to an unusual one
      const Stage values = keys_.Before();
      if (!keys_there) BarrierWait(SharedAddress(&shared_.k_full[keys_.stage]), keys_.phase);
      if (WaitsEarly() && !values_there) {
        AwaitValues(values);
        values_there = true;
      }
      FenceRows();
      flags = shared_.steps[steps_.stage].flags;  // before the products: it takes a while
      if (Traits::kTiles.turns) WaitTurn();
      Pin(rows);
      WgmmaFence();
      IssueScores<Traits>(rows, QueriesOperand(), KeysOperand());
      WgmmaCommit();
      if constexpr (kTrusts) TakeSums(*item, rows, tile);
      if (!values_there) AwaitValues(values);
      ClearUnseen(values);
      WgmmaFence();
      IssueValues<Traits>(rows, ValuesOperand(values), begins);
      WgmmaCommit();
      if (Traits::kTiles.turns) PassTurn();
      // By a vote, for the compiler's uniform registers.
      const bool trusts = kTrusts && __all_sync(~0u, !(flags & Step::kStarts) && trusts_);
      WgmmaWait<1>();
      KeepAfter(rows.s());
      Finish(*next, flags, steps_.stage, rows);
      const RowSums before = rows.sums;
      if (Traits::kQueryStages > 1 && ends) rows.sums = RowSums();
      // The first half of the exponentials runs under P V; the second hides the way from S to P and
      // the scaling of O. The wait is in both branches because the assembler moves it up as far as
      // it can, but not above a branch.
      bool moved = false;
      if (!trusts) {
        moved = Follow(flags, rows, factor);
        if constexpr (kTrusts) {
          if (flags & Step::kStarts) {
            BeginTrust(*next, flags, rows.sums);
          } else {
            NoteTrust(flags, rows.sums);
          }
          rows.sums.sum[0] *= factor[0];
          rows.sums.sum[1] *= factor[1];
        }
      }
      TakeDropout(*next, flags);
      LeaveScores(flags);
      float sum[2][2] = {};
      WithExponent([&](const auto& exponent) { Exponentials<0, kHalf>(rows, exponent, sum); });
      KeepAfter(sum[0]);
      KeepAfter(sum[1]);
      if (moved) {
        WgmmaWait<0>();
        KeepAfter(rows.o());
        if (!ends) Rescale<Traits>(rows, factor);
      } else {
        WgmmaWaitApart();
        KeepAfter(rows.o());
      }
      LeaveKeys(&shared_.v_empty[values.stage]);
      // To ask takes as long as some exponentials; they hide it. Dense keys are 2 % slower with it.
      if constexpr (Traits::kPaged) {
        keys_there = IsThere(shared_.k_full, keys_);
        values_there = IsThere(shared_.v_full, keys_.Before());
      }
      WithExponent(
          [&](const auto& exponent) { Exponentials<kHalf, kColumns>(rows, exponent, sum); });
      KeepSums(rows, factor, sum, tile);
      PackRows(rows);
      if (Traits::kQueryStages > 1 && ends) {
        WriteItem(*item, before, rows);
        item = next;
      }
    }
    const Stage values = keys_.Before();
    if constexpr (kTrusts) TakeSums(*item, rows, tile);
    AwaitValues(values);
    FenceRows();
    ClearUnseen(values);
    Pin(rows);
    WgmmaFence();
    IssueValues<Traits>(rows, ValuesOperand(values), flags & Step::kStarts);
    WgmmaCommit();
    WgmmaWait<0>();
    KeepAfter(rows.o());
    LeaveKeys(&shared_.v_empty[values.stage]);
    WriteItem(*item, rows.sums, rows);
    return Traits::kQueryStages == 1 ? NextItem() : next;
  }

  // The same in 8 bits (consumer_narrow.cuh).
  __device__ __forceinline__ int TakeStep();
  __device__ __forceinline__ const Item* ComputeNarrow(const Item* item, Rows<Traits>& rows);

  // Moves the references of a tile's rows; true: some row of this warp may have a new one.
  __device__ __forceinline__ bool Follow(int flags, Rows<Traits>& rows, float (&factor)[2]) {
    if constexpr (Traits::kCapped) {
      const float size = fmaxf(sizes_[0], sizes_[1]);
      if (!(flags & Step::kMasked)) {  // nearly always nothing is to be done
        bool usual = size <= p_.tiny_bound;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          usual &= sizes_[half] * p_.tiny_cap.c1 <= rows.sums.reference[half] + kOutgrown;
          factor[half] = 1.0f;
        }
        tiny_ = __all_sync(~0u, usual);
        if (tiny_) return false;
      }
      Cap(!(flags & Step::kMasked), size, rows);
    }
    if (Traits::kHasBases && HasBases(p_)) return MoveBases(rows, factor);
    return FollowMaxima(rows, exponent_, factor);
  }

  // What is done in place of maxima (consumer_trust.cuh).
  __device__ __forceinline__ void BeginTrust(const Item& item, int flags, RowSums& sums);
  __device__ __forceinline__ void NoteTrust(int flags, const RowSums& sums);
  __device__ __forceinline__ void KeepSums(Rows<Traits>& rows, const float (&factor)[2],
                                           const float (&sum)[2][2], float (&tile)[2]) const;
  __device__ __forceinline__ void TakeSums(const Item& item, Rows<Traits>& rows, float (&tile)[2]);
  __device__ __forceinline__ void ComputeAgain(const Item& item, int step, Rows<Traits>& rows,
                                               float (&tile)[2]);
  // Steps like most (consumer_usual.cuh). At which tiles' maxima a warp looks meanwhile: none, as
  // it trusts its references, the next one's, or all until its item ends.
  enum Looks { kAtNone, kAtNext, kAtAll };
  __device__ __forceinline__ bool IsUnusual(int flags) const;
  __device__ __forceinline__ void ComputeUsual(const Item& item, bool& begins, Rows<Traits>& rows,
                                               float (&tile)[2]);
  __device__ __forceinline__ void ComputeUsualStep(const Item& item, Stage values, bool begins,
                                                   Looks& looks, Rows<Traits>& rows,
                                                   float (&tile)[2]);

  // With a softcap, before the exponentials: what turns this tile's scores into exponents is a
  // polynomial, of the lowest degree that serves `size`, the largest of this thread's; if none
  // does, the scores are capped here.
  __device__ __forceinline__ void Cap(bool may_be_tiny, float size, Rows<Traits>& rows) {
    const float factor = p_.scale * Reciprocal(p_.softcap);
    tiny_ = may_be_tiny && __all_sync(~0u, size <= p_.tiny_bound);
    exponent_ = SmallSoftCap(p_.softcap * kLog2E, factor).KeepsInfinity();
    if (!tiny_ && __any_sync(~0u, !(size * factor <= kSmallTanh))) {  // also with a NaN
      CapScores(p_, rows);
      exponent_ = SmallSoftCap::None().KeepsInfinity();
    }
  }
  template <typename Use>
  __device__ __forceinline__ void WithExponent(const Use& use) const {
    if (Traits::kCapped && tiny_) {
      use(p_.tiny_cap);
    } else {
      use(exponent_);
    }
  }

  __device__ __forceinline__ void PackRows(Rows<Traits>& rows) const {
    if constexpr (Traits::kDrops) {
      PackKept(rows, dropout_);
    } else {
      PackProbabilities<Traits>(rows);
    }
  }

  // With dropout, in front of a tile's exponentials.
  __device__ __forceinline__ void TakeDropout(const Item& item, int flags) {
    if constexpr (Traits::kDrops) {
      if (flags & Step::kStarts) dropout_.TakeRows(item.key, item.first + FirstRow(), Lane());
      TakeDroppedKeys(steps_.stage);
    }
  }
  __device__ __forceinline__ void TakeDroppedKeys(int step) {
    if constexpr (Traits::kDrops) {
      dropout_.TakeKeys(shared_.steps[step].first, p_.dropout.least);
    }
  }

  // The scores of step `number` have arrived; here they are finished.
  __device__ __forceinline__ void Finish(const Item& item, int flags, int number,
                                         Rows<Traits>& rows) {
    const bool masked = flags & Step::kMasked;
    clear_from_ = Traits::kKeys;
    clear_to_ = 0;
    if constexpr (Traits::kCapped) LargestSizes(rows, sizes_);
    if (Traits::kNarrow ? __builtin_expect(masked, false) : rules_.finish || masked) {
      const Step& step = shared_.steps[number];
      const int first = step.first, end = step.end;
      if (flags & Step::kDirty) {
        clear_from_ = end - first;
        if constexpr (Traits::kPaged) {
          const Sequence& all = item.sequence;
          clear_from_ = max(min(all.EndKey(all.q_len - 1) - first, Traits::kKeys), 0);
          clear_to_ = all.FirstKey(0) - first;
        }
      }
      Sequence s = item.sequence;
      s.kv_len = min(s.kv_len, end);
      const int query = item.first + FirstRow();
      if constexpr (Traits::kPaged) {
        const int row = FirstRow() + Lane() / 4;
        MaskBand<Traits>(
            s, rows.state, [&](int n) { return PlaceOf<Traits>(p_, item, row + n).query; },
            first + Lane() % 4 * 2);
        if (flags & Step::kHoles) {
          MaskHoles<Traits>(shared_.paged.holes[number], rows, Lane());
        }
      } else if constexpr (Traits::kKind == ForwardKind::kGeneral) {
        FinishScores<Traits>(p_, s, rules_, masked, flags & Step::kSegments, item.head, rows.state,
                             query, first, Lane());
      } else {
        const int row = query + Lane() / 4, key = first + Lane() % 4 * 2;
        MaskPositions<Traits>(s, rows.state, row, key);
        if (!Traits::kDense && (flags & Step::kSegments) != 0) {
          MaskSegments<Traits>(p_, s, rows.state, row, key);
        }
        if (Traits::kHasLists && p_.tile_masks != nullptr) {
          MaskTileBits<Traits>(p_, s, item.head, rows.state, row, key);
        }
      }
    }
  }

  // K is free, and Q after the last, and the step, if TakeSums does not need it. This stands behind
  // the maxima, since the way from products to probabilities is what a step waits for.
  __device__ __forceinline__ void LeaveScores(int flags) {
    if constexpr (kTrusts) {
      steps_.Advance();
    } else {
      LeaveStep();
    }
    LeaveKeys(&shared_.k_empty[keys_.stage]);
    if (flags & Step::kLast) Leave(&shared_.q_empty[queries_.stage]);
    keys_.Advance();
  }

  __device__ __forceinline__ void ClearOutput(Rows<Traits>& rows) {
#pragma unroll
    for (int i = 0; i < Traits::kValueDim / 2; ++i) rows.o()[i] = 0.0f;
    if constexpr (Traits::kNarrow) rows.total[0] = rows.total[1] = 0.0f;
  }
  __device__ __forceinline__ void WriteItem(const Item& item, const RowSums& sums,
                                            Rows<Traits>& rows) {
    if constexpr (Traits::kJoins) return JoinItem(item, sums, rows);
    if constexpr (Traits::kSharesKeys) {
      if (item.pieces > 1) return WritePiece(item, sums, rows);
    }
    WriteRows(item, sums, rows);
  }

  // The same for an item that is a piece: the last one of its rows writes them.
  __device__ __forceinline__ void WritePiece(const Item& item, const RowSums& sums,
                                             Rows<Traits>& rows) {
    StorePiece<Traits>(PieceOf<Traits>(p_, item.first_slot + item.piece, group_, Thread()), sums,
                       rows);
    int32_t* const arrived = p_.arrived + item.first_slot * Traits::kConsumers + group_;
    if (IsLastPiece(arrived, item.pieces, Thread(), 1 + Traits::kConsumers + group_,
                    &shared_.paged.last[group_])) {
      const float4* const first = PieceOf<Traits>(p_, item.first_slot, group_, Thread());
      const int64_t apart = PieceOf<Traits>(p_, item.first_slot + 1, group_, Thread()) - first;
      WriteRows(item, JoinPieces<Traits>(first, apart, item.pieces, rows), rows);
    } else if constexpr (Traits::kStagesOutput) {
      TakeOutput();
      if (Thread() == 0) shared_.paged.writes[group_] = false;
      LeaveOutput();
    }
  }

  __device__ __forceinline__ void WriteRows(const Item& item, const RowSums& sums,
                                            Rows<Traits>& rows) {
    float factor[2];
    const RowLse lse = FinishRows<Traits>(p_, item, sums, rows, factor, FirstRow(), Lane());
    if constexpr (Traits::kStagesOutput) {
      TakeOutput();
      if constexpr (Traits::kSharesKeys) {
        if (Thread() == 0) shared_.paged.writes[group_] = true;
      }
      StageOutput<Traits>(factor, rows, SharedAddress(shared_.o[group_]), Thread() / 32, Lane());
      FenceAsync();
      // Here, since the fence would wait for it.
      StoreLse<Traits>(p_, item, lse, FirstRow(), Lane());
      LeaveOutput();
    } else {
      StoreLse<Traits>(p_, item, lse, FirstRow(), Lane());
      StoreOutput<Traits>(p_, item, factor, rows, FirstRow(), Lane());
    }
  }

  // The same for an item that is joined with what is in its place.
  __device__ __forceinline__ void JoinItem(const Item& item, const RowSums& sums,
                                           Rows<Traits>& rows) {
    TakeOutput();
    const JoinedRows joined =
        JoinRows<Traits>(shared_.joined.lse[group_], item, sums, FirstRow(), Lane());
    StageJoined<Traits>(joined, rows, SharedAddress(shared_.o[group_]), Thread() / 32, Lane());
    FenceAsync();
    StoreJoinedLse<Traits>(p_, item, joined, FirstRow(), Lane());
    LeaveOutput();
  }

  // The place for O is this consumer's; then, with O or at the end, the writer's. It is empty at
  // first, but that of a joined item is not: the writer has to fill it.
  __device__ __forceinline__ void TakeOutput() {
    const int phase = Traits::kJoins ? outputs_.phase : outputs_.phase ^ 1;
    BarrierWait(SharedAddress(&shared_.o_empty[group_]), phase);
  }
  __device__ __forceinline__ void LeaveOutput() {
    BarrierArrive(SharedAddress(&shared_.o_full[group_]));
    outputs_.Advance();
  }

  __device__ __forceinline__ static bool IsThere(uint64_t (&full)[Traits::kStages], Stage at) {
    return BarrierTest(SharedAddress(&full[at.stage]), at.phase);
  }
  // V of the tile before.
  __device__ __forceinline__ void AwaitValues(Stage values) {
    BarrierWait(SharedAddress(&shared_.v_full[values.stage]), values.phase);
  }
  // Where V is late, as in small blocks, nobody waits for it in a turn at the tensor cores.
  __device__ __forceinline__ bool WaitsEarly() const {
    if constexpr (Traits::kPaged) return p_.box_rows < 32;
    return false;
  }
  // Rows of V that hold what nobody may see.
  __device__ __forceinline__ void ClearUnseen(Stage values) {
    if constexpr (Traits::kNarrow) return;  // they were cleared on the way (transpose_values.cuh)
    if (clear_from_ < Traits::kKeys) {
      ClearRows<Traits>(shared_.v[values.stage], clear_from_, Traits::kKeys, Thread(),
                        1 + Traits::kConsumers + group_);
    }
    if constexpr (Traits::kPaged) {
      if (clear_to_ > 0) {
        ClearRows<Traits>(shared_.v[values.stage], 0, clear_to_, Thread(),
                          1 + Traits::kConsumers + group_);
      }
    }
  }
  // Behind the arrival of rows that other threads have copied, in front of products.
  __device__ __forceinline__ void FenceRows() const {
    if (!LoadsBoxes<Traits>(p_)) FenceAsync();
  }
  __device__ __forceinline__ void LeaveStep() {
    BarrierArrive(SharedAddress(&shared_.step_empty[steps_.stage]));
    steps_.Advance();
  }

  // This warp is done with a place.
  __device__ __forceinline__ void Leave(uint64_t* empty) {
    if (Lane() == 0) BarrierArrive(SharedAddress(empty));
  }

  // The same for a tile of K or V, which every CTA of the cluster writes a part of.
  __device__ __forceinline__ void LeaveKeys(uint64_t* empty) {
    if (Traits::kCluster == 1) {
      Leave(empty);
    } else if (Lane() < Traits::kCluster) {
      ClusterBarrierArrive(SharedAddress(empty), Lane());
    }
  }

  // Turns at the tensor cores: hardware barrier 1 + g lets consumer g in; the one before it in the
  // ring arrives there when its products are issued.
  __device__ __forceinline__ void WaitTurn() { BarrierMeet(1 + group_, 2 * kWarpgroup); }
  __device__ __forceinline__ void PassTurn() {
    BarrierPass(group_ == Traits::kConsumers - 1 ? 1 : 2 + group_, 2 * kWarpgroup);
  }

  // This warp's first row in the query tile.
  __device__ __forceinline__ int FirstRow() const {
    return group_ * kConsumerRows + Thread() / 32 * 16;
  }

  // What the products read and add to is computed before this point.
  __device__ __forceinline__ void Pin(Rows<Traits>& rows) {
    KeepAfter(rows.summed());
#pragma unroll
    for (int step = 0; step < Traits::kProductSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(rows.p[step][i])::"memory");
    }
  }

  __device__ __forceinline__ uint64_t QueriesOperand() const {
    return SharedOperand(SharedAddress(shared_.q[queries_.stage]) +
                         group_ * kConsumerRows * kChunkRowBytes);
  }
  __device__ __forceinline__ uint64_t KeysOperand() const {
    return SharedOperand(SharedAddress(shared_.k[keys_.stage]));
  }
  __device__ __forceinline__ uint64_t ValuesOperand(Stage values) const {
    if constexpr (Traits::kNarrow) return SharedOperand(SharedAddress(shared_.v[values.stage]));
    return SharedOperand(SharedAddress(shared_.v[values.stage]), Traits::kKeys * kChunkRowBytes);
  }
  __device__ __forceinline__ static int Thread() { return threadIdx.x % kWarpgroup; }
  __device__ __forceinline__ static int Lane() { return threadIdx.x % 32; }

  const Params& p_;
  ForwardShared<Traits>& shared_;
  const int group_;
  ScoreRules rules_;
  Exponent exponent_;
  // With a softcap: of the tile before it was masked; whether tiny_cap serves it.
  float sizes_[2];
  bool tiny_ = false;
  int clear_from_ = Traits::kKeys;  // rows of V from here on are not to be seen
  int clear_to_ = 0;                // nor those before this one
  bool trusts_ = false;             // this warp needs no maxima of the next tile of its item
  bool grows_ = false;              // some row has outgrown its reference in this item
  std::conditional_t<Traits::kDrops, RowDropout<Traits::kKeys>, NothingDropped> dropout_;
  int items_ = 0;
  StageCount<kSteps> steps_;
  StageCount<Traits::kQueryStages> queries_;
  StageCount<1> outputs_;
  Stage keys_;  // of the next K; V of the tile before follows it
};

}  // namespace kvblock::hopper
