// A consumer of Hopper's kernel for latent caches (kernel.cuh), a warpgroup: the order of products,
// softmax and barriers.
//
// kOwn: 0 or 1. Consumer 0 owns the first, third, ... tile of a piece, the other one the rest. Who
// owns a tile has its scores and probabilities; both multiply these by their half of its values,
// tile by tile.
#pragma once

#include <cstdint>

#include "device/cluster.cuh"
#include "device/ldmatrix.cuh"
#include "device/mbarrier.cuh"
#include "device/stmatrix.cuh"
#include "device/tensor_copy.cuh"
#include "device/warpgroup.cuh"
#include "device/wgmma.cuh"
#include "ops/attention/hopper/forward/rows.cuh"
#include "ops/attention/hopper/latent/result.cuh"
#include "ops/attention/hopper/latent/shared.cuh"
#include "ops/attention/schedule/packed_rows.cuh"

namespace kvblock::hopper {

template <typename Traits, int kOwn>
class LatentConsumer {
 public:
  using T = typename Traits::T;
  using Params = typename Traits::Params;

  __device__ __forceinline__ LatentConsumer(const Params& p, LatentShared<Traits>& shared)
      : p_(p),
        shared_(shared),
        exponent_{p.scale * kLog2E},
        peer_(RankOf<Traits>() ^ 1),
        meet_(shared) {}

  __device__ __forceinline__ void Run() {
#pragma unroll 1
    for (int number = 0;; ++number) {
      const int place = number % kPieces;
      BarrierWait(SharedAddress(&shared_.piece_full[place]), number / kPieces & 1);
      const LatentPiece& piece = shared_.pieces[place];
      const int tiles = piece.tiles;
      if (tiles == 0) return;
      Compute(piece, tiles, number);
      BarrierArrive(SharedAddress(&shared_.piece_empty[place]));
      before_ += tiles;
    }
  }

 private:
  static constexpr int kOther = 1 - kOwn;
  static constexpr int kValueGroup =
      kOwn * 2;  // the first of the two that this consumer multiplies

  // Where a tile of the piece lies, and in which phase its place is.
  struct Where {
    int stage, phase;
  };
  __device__ __forceinline__ Where Find(int tile) const {
    const int number = before_ + tile;
    return {number % Traits::kStages, number / Traits::kStages & 1};
  }

  __device__ __forceinline__ uint32_t Full(const Where& at, int group) const {
    return SharedAddress(&shared_.full[at.stage][group]);
  }

  __device__ __forceinline__ void Compute(const LatentPiece& piece, int tiles, int number) {
    Rows<Traits> rows;
#pragma unroll
    for (float& x : rows.o()) x = 0.0f;
    Begin(piece);
    BarrierWait(SharedAddress(&shared_.q_full), number & 1);
    if constexpr (kOwn == 0) {
      AddOwn<true>(piece, 0, rows);
#pragma unroll 1
      for (int tile = 2; tile < tiles; tile += 2) AddOwn<false>(piece, tile, rows);
    } else {
#pragma unroll 1
      for (int tile = 1; tile < tiles; tile += 2) AddOwn<false>(piece, tile, rows);
    }
    if (Lane() == 0) BarrierArrive(SharedAddress(&shared_.q_empty));
    if (tiles % 2 == kOwn) {  // the last one is the other's
      const Where last = Find(tiles - 1);
      MultiplyOthers(last, rows);
      LeaveValues<0>(last, others_, rows);
    }
    WriteResult<Traits, kOwn>(p_, shared_, piece, number, meet_, rows);
  }

  // The keys that this thread's rows see. A row that does not exist sees what the last one does.
  __device__ __forceinline__ void Begin(const LatentPiece& piece) {
    const Sequence& s = piece.sequence;
    const PackedRows packed(p_, 0, s.q_rows);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(piece.first_row + Row(half), packed.count() - 1);
      const int query = packed.Query(row);
      seen_from_[half] = s.FirstKey(query);
      seen_to_[half] = query < s.q_len ? s.EndKey(query) : 0;
    }
  }

  // An own tile, and the one before it, which is the other's, unless this one begins the piece.
  //
  // Consumer 0 starts with its scores, since its tile comes when the one before is still without
  // probabilities; consumer 1 starts with the values of the one before. Of these consumer 0 leaves
  // the place once it knows the maxima of its own tile: they are multiplied by then.
  template <bool kBegins>
  __device__ __forceinline__ void AddOwn(const LatentPiece& piece, int tile, Rows<Traits>& rows) {
    const Where own = Find(tile), before = Find(tile - 1);
    const int key = piece.first_key + tile * Traits::kKeys;
    if constexpr (kOwn == 0) {
      ClearUnseen(piece, key, own);
      IssueScores<0, kChunkGroups>(own, rows);
      if constexpr (!kBegins) {
        MultiplyOthers(before, rows);
      }
      WgmmaWait<kBegins ? 0 : 2>();
    } else {
      MultiplyOthers(before, rows);
      ClearUnseen(piece, key, own);
      constexpr int kAhead = 1;  // so that there is work while it leaves these values
      IssueScores<0, kAhead>(own, rows);
      LeaveValues<kAhead>(before, others_, rows);
      IssueScores<kAhead, kChunkGroups>(own, rows);
      WgmmaWait<0>();
    }
    KeepAfter(rows.s());
    Mask(key, own.stage, rows);
    float factor[2], sum[2][2] = {};
    const bool moved = FollowMaxima<Traits>(rows, exponent_, factor);
    if constexpr (kOwn == 0 && !kBegins) LeaveValues<0>(before, others_, rows);
    Exponentials<0, Traits::kKeys / 8>(rows, exponent_, sum);
    AddSums<Traits>(rows, factor, sum);
    PackProbabilities<Traits>(rows);
    ShowProbabilities(own, rows);
    if (moved) Rescale<Traits>(rows, factor);
    IssueValues(own, rows.p, rows);
    LeaveValues<0>(own, rows.p, rows);
  }

  // O += P V of the other's tile.
  __device__ __forceinline__ void MultiplyOthers(const Where& at, Rows<Traits>& rows) {
    TakeOthers(at, rows);
    IssueValues(at, others_, rows);
    LeaveProbabilities(at);
  }

  // S (+)= Q K^T of some groups of chunks; the products of each are a group. (The assembler would
  // count them so in any case, as they do not follow one another at once.)
  template <int kFrom, int kTo>
  __device__ __forceinline__ void IssueScores(const Where& at, Rows<Traits>& rows) {
    const uint64_t q = SharedOperand(SharedAddress(shared_.q));
    const uint64_t k = SharedOperand(SharedAddress(shared_.tiles[at.stage]));
    bool there = false;
#pragma unroll
    for (int i = kFrom; i < kTo; ++i) {
      constexpr int kSteps = kChunkColumns / 16;
      const int group = GroupAt<Traits>(kOwn, i);
      if (!there) BarrierWait(Full(at, group), at.phase);
      // To ask takes as long as some of these products.
      if (i + 1 < kTo) there = BarrierTest(Full(at, GroupAt<Traits>(kOwn, i + 1)), at.phase);
      WgmmaFence();
#pragma unroll
      for (int step = 0; step < ChunksOf(group) * kSteps; ++step) {
        const int chunk = group * 2 + step / kSteps;
        const int bytes = chunk * Traits::kChunkBytes + step % kSteps * 32;
        Wgmma<Traits::kKeys>::template Shared<T>(rows.s(), Advance(q, bytes), Advance(k, bytes),
                                                 i + step > 0);
      }
      WgmmaCommit();
    }
  }

  // O += P V, of this consumer's columns; the products of each 128 of them are a group.
  __device__ __forceinline__ void IssueValues(const Where& at, uint32_t (&p)[Traits::kKeys / 16][4],
                                              Rows<Traits>& rows) {
    const char* const first = shared_.tiles[at.stage] + kValueGroup * 2 * Traits::kChunkBytes;
    const uint64_t v = SharedOperand(SharedAddress(first), Traits::kChunkBytes);
    KeepAfter(rows.o());
    Keep(p);
    WgmmaFence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 0; step < Traits::kKeys / 16; ++step) {
        Wgmma<128>::template Registers<T, OperandLies::kDown>(
            Columns(rows, half), p[step],
            Advance(v, half * 2 * Traits::kChunkBytes + step * 16 * kChunkRowBytes));
      }
      WgmmaCommit();
    }
  }
  // Waits for them, with kBehind groups of products behind them, and leaves each when it is done.
  template <int kBehind>
  __device__ __forceinline__ void LeaveValues(const Where& at, uint32_t (&p)[Traits::kKeys / 16][4],
                                              Rows<Traits>& rows) {
    WgmmaWait<kBehind + 1>();
    Leave(at, kValueGroup);
    WgmmaWait<kBehind>();
    Leave(at, kValueGroup + 1);
    KeepAfter(rows.o());
    Keep(p);
  }
  __device__ __forceinline__ void Leave(const Where& at, int group) {
    if (Lane() != 0) return;
    const uint32_t empty = SharedAddress(&shared_.empty[at.stage][group]);
    BarrierArrive(empty);
    if constexpr (Traits::kCluster > 1) ClusterBarrierArrive(empty, peer_);
  }
  // The same of the columns that all lanes have read P from.
  __device__ __forceinline__ void LeaveProbabilities(const Where& at) {
    if constexpr (Traits::kCluster > 1) {
      __syncwarp();
      Leave(at, kLastGroup);
    } else {
      BarrierArrive(SharedAddress(&shared_.empty[at.stage][kLastGroup]));
    }
  }

  // Rows of the tile that no row of the unit sees, where a box of them has come: a probability of 0
  // does not cancel a NaN. Its scores are masked.
  __device__ __forceinline__ void ClearUnseen(const LatentPiece& piece, int key, const Where& at) {
    const int from = piece.key_begin - key, to = piece.key_end - key;
    if (from <= 0 && to >= Traits::kKeys) return;
#pragma unroll 1
    for (int group = 0; group < kChunkGroups; ++group) {
      BarrierWait(Full(at, group), at.phase);
    }
    char* const tile = shared_.tiles[at.stage];
    const int end = max(to, 0);
    ClearRows<Traits>(tile, 0, min(max(from, 0), Traits::kKeys), Thread(), kRowsCleared + kOwn);
    ClearRows<Traits>(tile, min(end, Traits::kKeys), Traits::kKeys, Thread(), kRowsCleared + kOwn);
  }

  // -inf for keys that a row does not see, and for those that are in no block.
  __device__ __forceinline__ void Mask(int key, int stage, Rows<Traits>& rows) {
    const uint32_t holes[2] = {shared_.holes[stage][0], shared_.holes[stage][1]};
    const int from = max(seen_from_[0], seen_from_[1]), to = min(seen_to_[0], seen_to_[1]);
    const bool whole = from <= key && to >= key + Traits::kKeys && (holes[0] | holes[1]) == 0;
    if (__all_sync(~0u, whole)) return;
    auto& s = rows.state.s[0];
#pragma unroll
    for (int n = 0; n < Traits::kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int in_tile = n * 8 + Lane() % 4 * 2 + e % 2, j = key + in_tile;
        const bool hole = holes[n / 4] >> (in_tile % 32) & 1;
        if (j < seen_from_[e / 2] || j >= seen_to_[e / 2] || hole) s[n][e] = -INFINITY;
      }
    }
  }

  // P lies where the tile has its last 64 columns, which are keys alone, and read by now.
  __device__ __forceinline__ uint32_t PlaceOf(const Where& at, int step) const {
    const char* const last = shared_.tiles[at.stage] + Traits::kValueChunks * Traits::kChunkBytes;
    return SharedAddress(last) +
           SwizzledOffset(Traits::kRows, FirstRow() + Lane() % 16, step * 16 + Lane() / 16 * 8);
  }
  __device__ __forceinline__ void ShowProbabilities(const Where& at, Rows<Traits>& rows) {
    BarrierMeet(kScoresDone + kOwn, kWarpgroup);  // all of this consumer have read those columns
#pragma unroll
    for (int step = 0; step < Traits::kKeys / 16; ++step) {
      StoreMatrices(PlaceOf(at, step), rows.p[step]);
    }
    if (Lane() % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        shared_.references[kOwn][Row(half)] = rows.sums.reference[half];
      }
    }
    BarrierArrive(SharedAddress(&shared_.p_full[kOwn]));
  }
  // Waits for the other's probabilities; what there is of the rows follows their references.
  __device__ __forceinline__ void TakeOthers(const Where& at, Rows<Traits>& rows) {
    BarrierWait(SharedAddress(&shared_.p_full[kOther]), others_phase_);
    others_phase_ ^= 1;
#pragma unroll
    for (int step = 0; step < Traits::kKeys / 16; ++step) {
      LoadMatrices(others_[step], PlaceOf(at, step));
    }
    float factor[2];
    bool moved = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& reference = rows.sums.reference[half];
      const float before = reference;
      reference = shared_.references[kOther][Row(half)];
      factor[half] = Exp2(before - reference);
      moved |= before != reference;
      rows.sums.sum[half] *= factor[half];
    }
    if (__any_sync(~0u, moved)) Rescale<Traits>(rows, factor);
    // They came before the probabilities. This consumer's own products read them now.
    BarrierWait(Full(at, kValueGroup), at.phase);
    BarrierWait(Full(at, kValueGroup + 1), at.phase);
  }

  // Half of this consumer's columns of O.
  using HalfOutput = float[Traits::kValueDim / 4];
  __device__ __forceinline__ static HalfOutput& Columns(Rows<Traits>& rows, int half) {
    return reinterpret_cast<HalfOutput&>(rows.state.o[0][half * Traits::kValueDim / 16]);
  }
  // The operand is computed before this point, and its registers are not used again before it.
  __device__ __forceinline__ static void Keep(uint32_t (&p)[Traits::kKeys / 16][4]) {
#pragma unroll
    for (int step = 0; step < Traits::kKeys / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(p[step][i])::"memory");
    }
  }

  __device__ __forceinline__ static int Thread() { return threadIdx.x % kWarpgroup; }
  __device__ __forceinline__ static int Lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static int FirstRow() { return Thread() / 32 * 16; }
  __device__ __forceinline__ static int Row(int half) { return FirstRow() + half * 8 + Lane() / 4; }

  const Params& p_;
  LatentShared<Traits>& shared_;
  const Scaled exponent_;
  const int peer_;  // the cluster's other CTA
  BothMeet<Traits> meet_;
  int before_ = 0;                          // tiles of the pieces before
  int others_phase_ = 0;                    // of the other's next P
  int seen_from_[2], seen_to_[2];           // the keys that this thread's rows see
  uint32_t others_[Traits::kKeys / 16][4];  // the other's probabilities
};

}  // namespace kvblock::hopper
