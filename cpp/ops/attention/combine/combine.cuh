// Puts the pieces of units together that were cut between CTAs (schedule/shares.cuh).
//
//   lse = log2(sum_i 2^lse_i),   O = sum_i 2^(lse_i - lse) O_i,   then the sink
//
// CTAs (x, 0), (x, 1), ... have one unit of line x % lines: number x / lines, or, where there are
// more units than CTAs that made pieces, the one that is cut where the share of the CTA of that
// number ends, if no border before it cuts the same unit. A thread has four columns of a row; where
// units have many pieces, some threads share them out: always the same ones in the same order.
//
// The launch begins while the one that makes the pieces still runs, and waits for its own pieces,
// not for the whole launch: its CTAs are small enough to be on a multiprocessor beside the others.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/dependent.cuh"
#include "device/publish.cuh"
#include "ops/attention/combine/result.cuh"
#include "ops/attention/schedule/beside.cuh"
#include "ops/attention/schedule/packed_rows.cuh"
#include "ops/attention/schedule/shares.cuh"

namespace kvblock {

constexpr int kCombineThreads = 64;

template <typename T, int kKeys, typename Params>
class Combine {
 public:
  static constexpr int kThreads = kCombineThreads;

  __device__ __forceinline__ explicit Combine(const Params& p)
      : p_(p), number_(blockIdx.x - p.by_lines(blockIdx.x) * p.lines), line_(p, number_) {
    if constexpr (!Params::kSameRows) {
      if (p.sharing != nullptr) line_.SetCtas(__ldcg(p.sharing + kCtas));
    }
  }

  __device__ __forceinline__ void Run() {
    const int own_number = static_cast<int>(p_.by_lines(blockIdx.x));
    const int tile = p_.combine_units ? line_.FirstOf(own_number) : line_.Begin(own_number + 1);
    if (tile >= line_.total()) return;
    const Place at = line_.Find(tile);
    const int first = tile - at.tile;  // the unit's first tile
    if (HasSplit()) {
      begins_ = first;
      pieces_ = (at.rows.tiles + p_.split - 1) / p_.split;
    } else {
      owner_ = line_.Owner(first);
      pieces_ = line_.Owner(first + at.rows.tiles - 1) - owner_ + 1;
      begins_ = line_.Begin(owner_) < first ? 1 : 0;
    }
    if (pieces_ == 1) return;
    if (!p_.combine_units && line_.Begin(owner_ + 1) != tile) return;
    const Sequence s = MemberSequence(p_, at.rows.member);
    const PackedRows packed(p_, at.kv_head, s.q_rows);
    const int rows = min(p_.rows, packed.count() - at.rows.first_row);
    // Four columns of a row, for each of the p_.joining threads that have some of its pieces.
    const int across = kThreads / p_.joining, rank = static_cast<int>(threadIdx.x) / across;
    const int own = static_cast<int>(threadIdx.x) % across, groups = p_.value_dim / 4;
    const int begin = blockIdx.y * across;
#pragma unroll 1
    for (int first = begin; first < rows * groups; first += gridDim.y * across) {
      const int row = (first + own) / groups, column = (first + own - row * groups) * 4;
      const bool there = row < rows;
      const ResultRow<T> to(p_, s, packed, at.rows.first_row + min(row, rows - 1), column);
      if (first == begin) AwaitPieces();
      PartialRow result = {{-INFINITY, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
      if (there) AddPieces(rank, row, column, &result);
      if (p_.joining > 1) Join(across, &result);
      if (there && rank == 0) to.Write(result);
      if (Params::kSameRows) return;  // there are CTAs for all of them
    }
  }

 private:
  __device__ __forceinline__ bool HasSplit() const {
    return !Params::kSameRows && p_.split != kNoSplit;
  }
  // Where a piece lies: in its CTA's first place, but for a unit that begins there after another
  // one has ended.
  __device__ __forceinline__ unsigned SlotOf(int piece) const {
    if (HasSplit()) return line_.SplitSlot(begins_ + piece * p_.split, piece == 0);
    return PieceSlot((owner_ + piece) * p_.lines + number_, piece > 0 || begins_ == 0);
  }
  // Where there are fewer tiles than CTAs, some CTAs have none.
  __device__ __forceinline__ bool Exists(int piece) const {
    if (HasSplit()) return piece < pieces_;
    const int c = owner_ + piece;
    return piece < pieces_ &&
           (line_.total() >= line_.ctas() || line_.Begin(c) < line_.Begin(c + 1));
  }

  __device__ __forceinline__ void AwaitPieces() const {
    if (HasSplit()) return AwaitPriorLaunch();
    for (int piece = threadIdx.x; piece < pieces_; piece += kThreads) {
      if (!Exists(piece)) continue;
      if constexpr (Params::kSameRows) {
        AwaitPublished(p_.piece_there + SlotOf(piece));
      } else {
        for (int i = 0; i < p_.piece_ctas; ++i) {
          AwaitPublished(p_.piece_there + SlotOf(piece) * p_.piece_ctas + i);
        }
      }
    }
    __syncthreads();
  }

  // Every p_.joining-th piece, from `begin` on, as the forward kernels add up tiles; some at a time
  // are on their way.
  __device__ __forceinline__ void AddPieces(int begin, int row, int column,
                                            PartialRow* result) const {
    constexpr int kAhead = Params::kSameRows ? 5 : 4;
#pragma unroll 1
    for (; begin < pieces_; begin += kAhead * p_.joining) {
      float lse[kAhead];
      float4 o[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int piece = begin + i * p_.joining;
        lse[i] = -INFINITY;
        o[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (!Exists(piece)) continue;
        const unsigned at = SlotOf(piece) * p_.rows + row;  // the workspace is small
        lse[i] = __ldcg(p_.piece_lse + at);
        o[i] = __ldcg(reinterpret_cast<const float4*>(p_.piece_o + at * p_.value_dim + column));
      }
      float top = result->sums.max;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) top = fmaxf(top, lse[i]);
      const float reference = Reference(top, 1.0f), factor = Exp2(result->sums.max - reference);
      result->sums = {top, result->sums.sum * factor};
#pragma unroll
      for (int i = 0; i < 4; ++i) result->o[i] *= factor;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const float weight = Exp2(lse[i] - reference);
        result->sums.sum += weight;
        result->Add(o[i], weight);
      }
    }
    if (result->sums.max == -INFINITY) result->sums.sum = 0.0f;
  }

  // What the threads of the same columns have, at the first of them. All threads of the CTA.
  __device__ __forceinline__ void Join(int across, PartialRow* result) const {
    __shared__ PartialSum sums[kThreads];
    __shared__ float4 columns[kThreads];
    const int thread = threadIdx.x;
    __syncthreads();  // of an earlier round, all have read them
    sums[thread] = result->sums;
    columns[thread] = make_float4(result->o[0], result->o[1], result->o[2], result->o[3]);
    __syncthreads();
    if (thread >= across) return;
    float top = result->sums.max;
    for (int i = thread + across; i < kThreads; i += across) top = fmaxf(top, sums[i].max);
    const float reference = Reference(top, 1.0f);
    *result = {{top, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
    for (int i = thread; i < kThreads; i += across) {
      const float factor = Exp2(sums[i].max - reference);
      result->sums.sum += sums[i].sum * factor;
      result->Add(columns[i], factor);
    }
  }

  const Params& p_;
  const int number_;
  Line<kKeys, kThreads, Params> line_;
  int owner_, pieces_;
  int begins_;  // with a split, where the unit does; else whether it does so after another one
};

template <typename T, int kKeys, typename Params>
__global__ void __launch_bounds__(kCombineThreads, 16)
    AttentionCombine(const __grid_constant__ Params p) {
  Combine<T, kKeys, Params>(p).Run();
  // This launch must not end before the one in front of it, whoever has nothing to wait for.
  if (blockIdx.x + blockIdx.y == 0) AwaitPriorLaunch();
}

}  // namespace kvblock
