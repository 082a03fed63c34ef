// Puts the pieces of units together that were cut between CTAs (schedule/shares.cuh).
//
//   lse = log2(sum_i 2^lse_i),   O = sum_i 2^(lse_i - lse) O_i,   then the sink
//
// CTAs (x, 0), (x, 1), ... have one unit: the x-th one, or, where there are more units than CTAs
// that made pieces, the one that is cut where the share of the x-th such CTA ends, if no border
// before it cuts the same unit. A thread has four columns of a row; where units have many pieces,
// some threads share them out: always the same ones in the same order.
//
// The launch begins while the one that makes the pieces still runs, and waits for its own pieces,
// not for the whole launch: its CTAs are small enough to be on a multiprocessor beside the others.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/dependent.cuh"
#include "device/publish.cuh"
#include "ops/attention/combine/result.cuh"
#include "ops/attention/mask/packed_rows.cuh"
#include "ops/attention/schedule/shares.cuh"

namespace kvblock {

constexpr int kCombineThreads = 64;

template <typename T, int kKeys>
class Combine {
 public:
  static constexpr int kThreads = kCombineThreads;

  __device__ __forceinline__ explicit Combine(const ShareParams& p) : p_(p), line_(p) {}

  __device__ __forceinline__ void Run() {
    const int cta = blockIdx.x + 1;
    const int tile = p_.combine_units ? line_.FirstOf(blockIdx.x) : line_.Begin(cta);
    if (tile >= line_.total()) return;
    const Place at = line_.Find(tile);
    const int first = tile - at.tile;  // the unit's first tile
    owner_ = line_.Owner(first);
    pieces_ = line_.Owner(first + at.rows.tiles - 1) - owner_ + 1;
    if (pieces_ == 1) return;
    if (!p_.combine_units && line_.Begin(owner_ + 1) != tile) return;
    begins_ = line_.Begin(owner_) < first ? 1 : 0;
    // Four columns of a row, for each of the p_.joining threads that have some of its pieces.
    const int across = kThreads / p_.joining, rank = static_cast<int>(threadIdx.x) / across;
    const int item = blockIdx.y * across + static_cast<int>(threadIdx.x) % across;
    const int row = item / (p_.value_dim / 4), column = (item - row * (p_.value_dim / 4)) * 4;
    const PackedRows packed(p_, at.kv_head);
    const bool there = row < p_.rows && at.rows.first_row + row < packed.count;
    const int last = packed.count - 1;
    const ResultRow<T> to(p_, MemberSequence(p_, at.rows.member), packed,
                          min(at.rows.first_row + row, last), column);
    AwaitPieces();
    PartialRow result = {{-INFINITY, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
    if (there) AddPieces(rank, row, column, &result);
    if (p_.joining > 1) Join(across, &result);
    if (there && rank == 0) to.Write(result);
  }

 private:
  // Where a piece lies: in its CTA's first place, but for a unit that begins there after another
  // one has ended.
  __device__ __forceinline__ int SlotOf(int piece) const {
    return PieceSlot(owner_ + piece, piece > 0 || begins_ == 0);
  }
  // Where there are fewer tiles than CTAs, some CTAs have none.
  __device__ __forceinline__ bool Exists(int piece) const {
    const int c = owner_ + piece;
    return piece < pieces_ && (line_.total() >= p_.ctas || line_.Begin(c) < line_.Begin(c + 1));
  }

  __device__ __forceinline__ void AwaitPieces() const {
    for (int piece = threadIdx.x; piece < pieces_; piece += kThreads) {
      if (Exists(piece)) AwaitPublished(p_.piece_there + SlotOf(piece));
    }
    __syncthreads();
  }

  // Every p_.joining-th piece, from `begin` on, as the forward kernels add up tiles; some at a time
  // are on their way.
  __device__ __forceinline__ void AddPieces(int begin, int row, int column,
                                            PartialRow* result) const {
    constexpr int kAhead = 5;
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

  const ShareParams& p_;
  const Line<kKeys, kThreads> line_;
  int owner_, begins_, pieces_;
};

template <typename T, int kKeys>
__global__ void __launch_bounds__(kCombineThreads, 16)
    AttentionCombine(const __grid_constant__ ShareParams p) {
  Combine<T, kKeys>(p).Run();
  // This launch must not end before the one in front of it, whoever has nothing to wait for.
  if (blockIdx.x + blockIdx.y == 0) AwaitPriorLaunch();
}

}  // namespace kvblock
