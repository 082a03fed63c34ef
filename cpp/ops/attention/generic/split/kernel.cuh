// Attention forward for few queries on mma.sync: any GPU from sm_80 on. What takes time here is to
// read K and V, so all multiprocessors read all the time, and every row of K and V is read once for
// all the queries and heads that share it.
//
// A CTA computes the pieces that are its share (schedule/shares.cuh): a tile of packed rows
// (mask/packed_rows.cuh) against some of the KV tiles that they see. Its warps share out a tile's
// rows, 16 each, and where there are fewer rows its keys; those who have the same rows put their
// results together when the piece ends.
//
// CTAs come in two widths. Two narrow ones on a multiprocessor hide each other's ends of pieces;
// wide ones, of which it has one, are half as many, so that there may be one for each unit, and no
// pieces to put together (plan.h).
//
// K and V arrive by asynchronous copies, kStages - 1 tiles ahead, also across pieces.
//
//   find the share's first tile, start loading kStages - 1 tiles
//   for each tile:
//     wait for it; all meet; start loading another; near the end, let combine.cuh's launch begin
//     a piece begins: its rows of Q to registers, no maxima and sums
//     S = Q K^T; scale, softcap; mask; new maxima; O += P V      as in forward/kernel.cuh
//     a piece ends: join the warps' results, and write O and lse, or leave them to be combined
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/dependent.cuh"
#include "device/fast_math.cuh"
#include "device/mma.cuh"
#include "device/publish.cuh"
#include "device/shared.cuh"
#include "ops/attention/combine/result.cuh"
#include "ops/attention/generic/forward/kernel.cuh"
#include "ops/attention/generic/keys.cuh"
#include "ops/attention/generic/tile.cuh"
#include "ops/attention/mask/forward_scores.cuh"
#include "ops/attention/mask/packed_rows.cuh"
#include "ops/attention/schedule/shares.cuh"

namespace kvblock::generic {

// At most 227 KiB for the CTAs of a multiprocessor.
struct SplitShape {
  int keys, stages, ctas;  // of a tile; tiles in shared memory; CTAs on a multiprocessor
  int warps;
};
constexpr SplitShape NarrowShapeOf(int dim) {
  return dim == 64    ? SplitShape{128, 3, 2, 4}
         : dim == 128 ? SplitShape{64, 3, 2, 4}
         : dim == 192 ? SplitShape{64, 2, 2, 4}
                      : SplitShape{64, 2, 1, 4};
}
// Above 192 a tile for eight warps would leave no room for a second one.
constexpr bool HasWide(int dim) { return dim <= 192; }
constexpr SplitShape WideShapeOf(int dim) {
  return dim == 64 ? SplitShape{256, 3, 1, 8} : SplitShape{128, dim == 128 ? 3 : 2, 1, 8};
}

// kRowBlocks: of 16 packed rows in a tile; 1, 2 or 4.
template <typename T_, int kDim_, int kRowBlocks_, bool kWide_ = false>
struct SplitTraits {
  using T = T_;
  static constexpr bool kWide = kWide_;
  static constexpr int kDim = kDim_, kTileBlocks = kRowBlocks_, kRows = kTileBlocks * 16;
  static constexpr SplitShape kSplit = kWide ? WideShapeOf(kDim) : NarrowShapeOf(kDim);
  static constexpr int kWarps = kSplit.warps, kThreads = kWarps * 32;
  static constexpr int kParts = kWarps / kTileBlocks;  // of a tile's keys
  static constexpr int kTileKeys = kSplit.keys, kStages = kSplit.stages;
  using KvTile = SharedTile<kTileKeys, kDim>;
  static constexpr int kStageBytes = 2 * KvTile::kBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  // As forward/kernel.cuh names them, for a warp: 16 rows and a part of the keys.
  static constexpr int kRowBlocks = 1, kKeys = kTileKeys / kParts;
  static constexpr ForwardShape kShape = {16, kKeys, 1, kSplit.ctas, true};
  using QTile = SharedTile<16, kDim>;
  static_assert(kKeys % 16 == 0);
  static_assert(kWarps * 16 * kDim * 4 <= kStageBytes);  // all warps' O
};

template <typename Traits_>
class SplitForward {
 public:
  using Traits = Traits_;
  using T = typename Traits::T;
  static constexpr int kDim = Traits::kDim, kTileBlocks = Traits::kTileBlocks;
  using KvTile = typename Traits::KvTile;

  __device__ __forceinline__ explicit SplitForward(const ShareParams& p)
      : p_(p),
        line_(p),
        shared_(static_cast<uint32_t>(__cvta_generic_to_shared(DynamicShared()))),
        rules_(MakeScoreRules(p)) {}

  __device__ __forceinline__ void Run() {
    constexpr int kStages = Traits::kStages;
    const int cta = blockIdx.x, begin = line_.Begin(cta);
    const int tiles = line_.Begin(cta + 1) - begin;  // of the share, counted from 0 from here on
    if (tiles <= 0) return;
    // The next tile to load; and at i % kPlaces, where tile i is that is to be computed. Where
    // registers are scarce the next tile is found there, too, by thread 0 for all.
    Place ahead = line_.Find(begin);
    constexpr int kPlaces = 4;
    static_assert(kPlaces > kStages);
    __shared__ Place places[kPlaces];
    if (kScarce && threadIdx.x == 0) places[0] = ahead;
    const auto load = [&](int tile) {
      if (tile < tiles) {
        Load(kScarce ? places[tile % kPlaces] : ahead, tile % kStages);
        const bool more = tile + 1 < tiles;
        if (kScarce) {
          if (threadIdx.x == 0 && more) {
            Place next = places[tile % kPlaces];
            line_.Next(&next);
            places[(tile + 1) % kPlaces] = next;
          }
        } else {
          if (threadIdx.x == 0) places[tile % kPlaces] = ahead;
          if (more) line_.Next(&ahead);
        }
      }
      CopyAsyncCommit();
    };
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) {
      if (kScarce) __syncthreads();
      load(i);
    }
    if (threadIdx.x == 0) WithdrawPieces(cta);

    int piece = 0;  // where the piece begins
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      CopyAsyncWait<kStages - 2>();
      __syncthreads();  // this tile has arrived for all, and all are done with the one before
      load(tile + kStages - 1);
      if (threadIdx.x == 0 && tile == max(tiles - kTilesToBegin, 0)) LetNextLaunchBegin();
      const Place& at = places[tile % kPlaces];
      if (tile == piece) Begin(at);
      const uint32_t stage = Stage(tile % kStages);
      Compute(at, stage);
      const bool last = at.tile + 1 == at.rows.tiles;
      if (last || tile + 1 == tiles) {
        const bool whole = last && tile - piece == at.tile;
        End(at, whole, PieceSlot(cta, piece == 0), DynamicShared() + (stage - shared_));
        piece = tile + 1;
      }
    }
    CopyAsyncWait<0>();
  }

 private:
  // The launch that combines begins so many tiles before the end: it takes some microseconds to be
  // there, and looks for its pieces from then on.
  static constexpr int kTilesToBegin = 6;
  static constexpr bool kScarce = kDim > 192;

  // The next launch sees this before it can begin.
  __device__ __forceinline__ void WithdrawPieces(int cta) const {
    Withdraw(p_.piece_there + PieceSlot(cta, true));
    Withdraw(p_.piece_there + PieceSlot(cta, false));
    __threadfence();
  }

  __device__ __forceinline__ uint32_t Stage(int stage) const {
    return shared_ + stage * Traits::kStageBytes;
  }
  __device__ __forceinline__ void Load(const Place& at, int stage) const {
    const DenseKeys<T> keys(p_, at.rows.member, at.kv_head);
    keys.template Load<KvTile, Traits::kThreads>(Stage(stage), Stage(stage) + KvTile::kBytes,
                                                 at.rows.first_key + at.tile * Traits::kTileKeys,
                                                 at.rows.kv_len, threadIdx.x);
  }

  // The A operand of this warp's rows of Q, straight from memory: a load of 4 bytes fills a
  // register. Rows past q_lens are zeros, too. Those that do not exist see every key there is;
  // nobody reads theirs.
  __device__ __forceinline__ void Begin(const Place& at) {
    const PackedRows packed(p_, at.kv_head);
    const Sequence s = MemberSequence(p_, at.rows.member);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = at.rows.first_row + Row(half);
      const bool there = row < packed.count;
      const int query = packed.Query(row);
      const bool read = there && query < s.q_len;
      first_[half] = there ? s.FirstKey(query) : 0;
      end_[half] = !there ? INT32_MAX : query < s.q_len ? s.EndKey(query) : 0;
      const T* const q =
          static_cast<const T*>(p_.q) + (read ? packed.Index(p_, s, row) : 0) * p_.head_dim;
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const int column = step * 16 + side * 8 + Lane() % 4 * 2;
          queries_.held[step][0][side * 2 + half] =
              read && column < p_.head_dim ? *reinterpret_cast<const uint32_t*>(q + column) : 0;
        }
      }
    }
    rows_.max[0][0] = rows_.max[0][1] = -INFINITY;
    rows_.sum[0][0] = rows_.sum[0][1] = 0.0f;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) rows_.o[0][n][e] = 0.0f;
    }
  }

  __device__ __forceinline__ void Compute(const Place& at, uint32_t stage) {
    const int own = Part() * Traits::kKeys;  // this warp's first key in the tile
    const uint32_t k_tile = stage + own * KvTile::kRowBytes, v_tile = k_tile + KvTile::kBytes;
    const int key = at.rows.first_key + at.tile * Traits::kTileKeys + own;
    Multiply<Traits>(rows_, queries_, 0, k_tile, 0, Lane());
    if (rules_.finish) ScaleScores<Traits>(p_, rows_);
    const bool whole =
        max(first_[0], first_[1]) <= key && min(end_[0], end_[1]) >= key + Traits::kKeys;
    if (!__all_sync(~0u, whole)) MaskKeys(key);
    if (p_.q_segments != nullptr && p_.kv_len > 0) MaskSegmentsOf(at, key);
    Rescale<Traits>(p_, rows_, rules_.to_log2);
    Accumulate<Traits>(p_, rows_, rules_.to_log2, v_tile, Lane());
  }

  __device__ __forceinline__ void MaskKeys(int key) {
#pragma unroll
    for (int n = 0; n < Traits::kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int j = key + n * 8 + Lane() % 4 * 2 + e % 2;
        if (j < first_[e / 2] || j >= end_[e / 2]) rows_.s[0][n][e] = -INFINITY;
      }
    }
  }
  __device__ __forceinline__ void MaskSegmentsOf(const Place& at, int key) {
    const int member = at.rows.member;
    const int32_t* const of_queries = p_.q_segments + member * p_.q_len;
    const int32_t* const of_keys = p_.kv_segments + member * p_.kv_len;
    const PackedRows packed(p_, at.kv_head);
    int segment[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(at.rows.first_row + Row(half), packed.count - 1);
      segment[half] = __ldg(of_queries + packed.Query(row));
    }
#pragma unroll
    for (int n = 0; n < Traits::kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int j = min(key + n * 8 + Lane() % 4 * 2 + e % 2, static_cast<int>(p_.kv_len) - 1);
        if (__ldg(of_keys + j) != segment[e / 2]) rows_.s[0][n][e] = -INFINITY;
      }
    }
  }

  // Joins what the warps have of the same rows, and writes it. `place` is the stage of the piece's
  // last tile: each warp has its O there, columns of a row swapped in pieces of 8 against bank
  // conflicts.
  __device__ __forceinline__ void End(const Place& at, bool whole, int slot, char* place) {
    __shared__ PartialSum sums[Traits::kParts][Traits::kRows];
    float own_max[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = RowSum(rows_.sum[0][half]);
      own_max[half] = rows_.max[0][half] * rules_.to_log2;  // -inf stays
      if (Lane() % 4 == 0) sums[Part()][Row(half)] = {own_max[half], sum};
    }
    __syncthreads();  // all are done with the tile, too
    float* const o = reinterpret_cast<float*>(place);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = Exp2(own_max[half] - Reference(Top(sums, Row(half)), 1.0f));
      float* const row = o + (Part() * Traits::kRows + Row(half)) * kDim;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        *reinterpret_cast<float2*>(row + Swapped(n, Row(half)) * 8 + Lane() % 4 * 2) =
            make_float2(rows_.o[0][n][half * 2] * factor, rows_.o[0][n][half * 2 + 1] * factor);
      }
    }
    __syncthreads();
    // Four columns a thread, kDim / 4 threads a row.
    constexpr int kAcross = kDim / 4;
    const PackedRows packed(p_, at.kv_head);
    const Sequence s = MemberSequence(p_, at.rows.member);
    const int rows = min(Traits::kRows, packed.count - at.rows.first_row);
    for (int i = threadIdx.x; i < rows * kAcross; i += Traits::kThreads) {
      const int row = i / kAcross, column = i % kAcross * 4;
      if (column >= p_.value_dim) continue;
      const float top = Top(sums, row), reference = Reference(top, 1.0f);
      PartialRow result = {{top, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
      for (int part = 0; part < Traits::kParts; ++part) {
        result.sums.sum += sums[part][row].sum * Exp2(sums[part][row].max - reference);
        const float4 x = *reinterpret_cast<const float4*>(
            o + (part * Traits::kRows + row) * kDim + Swapped(column / 8, row) * 8 + column % 8);
        result.Add(x, 1.0f);
      }
      if (whole) {
        const int of_all = at.rows.first_row + row;
        ResultRow<T>(p_, s, packed, of_all, column).Write(result);
      } else {
        StorePiece(p_, slot, row, column, result);
      }
    }
    if (whole) return;
    __syncthreads();
    if (threadIdx.x == 0) Publish(p_.piece_there + slot);
  }
  __device__ __forceinline__ static int Swapped(int n, int row) { return n ^ (row % 8); }
  __device__ __forceinline__ static float Top(
      const PartialSum (&sums)[Traits::kParts][Traits::kRows], int row) {
    float top = sums[0][row].max;
#pragma unroll
    for (int part = 1; part < Traits::kParts; ++part) top = fmaxf(top, sums[part][row].max);
    return top;
  }

  __device__ __forceinline__ static int Lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static int Warp() { return threadIdx.x / 32; }
  __device__ __forceinline__ static int Part() { return Warp() / kTileBlocks; }
  // This thread's two rows in the tile of rows.
  __device__ __forceinline__ static int Row(int half) {
    return Warp() % kTileBlocks * 16 + half * 8 + Lane() / 4;
  }

  const ShareParams& p_;
  const Line<Traits::kTileKeys, Traits::kThreads> line_;
  const uint32_t shared_;
  const ScoreRules rules_;
  QueryFragments<Traits> queries_;
  ForwardRows<Traits> rows_;
  int first_[2], end_[2];  // the keys that this thread's rows see
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kSplit.ctas)
    AttentionSplit(const __grid_constant__ ShareParams p) {
  SplitForward<Traits>(p).Run();
}

}  // namespace kvblock::generic
