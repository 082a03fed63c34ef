// Puts the pieces of units together that were cut between CTAs (schedule/shares.cuh).
//
//   lse = log2(sum_i 2^lse_i),   O = sum_i 2^(lse_i - lse) O_i,   then the sink
//
// CTA (c, r) looks at the border between the shares of CTAs c and c + 1: where it cuts a unit, and
// no border before it does, it combines rows of the unit, from the r-th of its groups of rows on. A
// row has one of its warps, or, where units have many pieces, some that share them out: always the
// same ones in the same order.
//
// The launch may begin before the pieces are there, while the CTAs that make them still run; only
// what comes before AwaitPriorLaunch happens then.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/dependent.cuh"
#include "ops/attention/combine/result.cuh"
#include "ops/attention/mask/packed_rows.cuh"
#include "ops/attention/schedule/shares.cuh"

namespace kvblock {

template <typename T, int kKeys>
class Combine {
 public:
  static constexpr int kWarps = 8, kThreads = kWarps * 32, kColumns = 32 * 4;

  __device__ __forceinline__ explicit Combine(const ShareParams& p) : p_(p), line_(p) {}

  __device__ __forceinline__ void Run() {
    // This launch must not end before the one in front of it, whoever else has nothing to wait for.
    if (blockIdx.x + blockIdx.y == 0) AwaitPriorLaunch();
    const int cta = blockIdx.x + 1, border = line_.Begin(cta);
    if (border >= line_.total() || border == line_.Begin(cta + 1)) return;
    const Place at = line_.Find(border);
    const int first = border - at.tile;  // the unit's first tile
    owner_ = first < border ? line_.Owner(first) : cta;
    // Of the borders that cut the unit, the first one counts: that of the CTA after its first
    // owner.
    if (first == border || line_.Begin(owner_ + 1) != border) return;
    begins_ = line_.Begin(owner_) < first ? 1 : 0;
    pieces_ = line_.Owner(first + at.rows.tiles - 1) - owner_ + 1;
    row_ = blockIdx.y * (kWarps / p_.joining) + Warp() / p_.joining;
    const PackedRows packed(p_, at.kv_head);
    const bool there = row_ < p_.rows && at.rows.first_row + row_ < packed.count;
    AwaitPriorLaunch();
    for (int column = Lane() * 4; column - Lane() * 4 < p_.value_dim; column += kColumns) {
      PartialRow result = {{-INFINITY, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
      if (there) result = AddPieces(column);
      if (p_.joining > 1) Join(&result);
      if (there && Warp() % p_.joining == 0 && column < p_.value_dim) {
        WriteRow<T>(p_, at.rows.sequence, packed, at.rows.first_row + row_, column, result);
      }
    }
  }

 private:
  __device__ __forceinline__ static int Lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static int Warp() { return threadIdx.x / 32; }
  // Where row `row_` of a piece lies: in its CTA's first place, but for a unit that begins there
  // after another one has ended.
  __device__ __forceinline__ int64_t RowOf(int piece) const {
    return static_cast<int64_t>(PieceSlot(owner_ + piece, piece > 0 || begins_ == 0)) * p_.rows +
           row_;
  }
  // Where there are fewer tiles than CTAs, some CTAs have none.
  __device__ __forceinline__ bool Exists(int piece) const {
    const int c = owner_ + piece;
    return piece < pieces_ && (line_.total() >= p_.ctas || line_.Begin(c) < line_.Begin(c + 1));
  }

  // Four columns of a piece, from where they lie; zeros where there is no piece.
  __device__ __forceinline__ float4 Load(int piece, int column) const {
    if (column >= p_.value_dim || !Exists(piece)) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return *reinterpret_cast<const float4*>(p_.piece_o + RowOf(piece) * p_.value_dim + column);
  }

  // This warp's pieces of the row, every p.joining-th, as the forward kernels add up tiles: each of
  // 32 lanes weighs a piece, then all add four columns of each. What the first ones have is on its
  // way while they are weighed.
  __device__ __forceinline__ PartialRow AddPieces(int column) const {
    constexpr int kAhead = 4;
    PartialRow result = {{-INFINITY, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
    for (int begin = Warp() % p_.joining; begin < pieces_; begin += 32 * p_.joining) {
      const int own = begin + Lane() * p_.joining;
      const float lse = Exists(own) ? p_.piece_lse[RowOf(own)] : -INFINITY;
      float4 loaded[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) loaded[i] = Load(begin + i * p_.joining, column);
      const float top =
          fmaxf(result.sums.max, OfWarp(lse, [](float a, float b) { return fmaxf(a, b); }));
      const float reference = Reference(top, 1.0f), factor = Exp2(result.sums.max - reference);
      const float weight = Exp2(lse - reference);
      const float sum = OfWarp(weight, [](float a, float b) { return a + b; });
      result.sums = {top, result.sums.sum * factor + sum};
#pragma unroll
      for (int i = 0; i < 4; ++i) result.o[i] *= factor;
      const int count = min((pieces_ - begin + p_.joining - 1) / p_.joining, 32);
      for (int at = 0; at < count; at += kAhead) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const float4 x = at == 0 ? loaded[i] : Load(begin + (at + i) * p_.joining, column);
          result.Add(x, __shfl_sync(~0u, weight, at + i));
        }
      }
    }
    if (result.sums.max == -INFINITY) result.sums.sum = 0.0f;
    return result;
  }

  // What the warps of a row have, at the first of them. All threads of the CTA.
  __device__ __forceinline__ void Join(PartialRow* result) const {
    __shared__ PartialSum sums[kWarps];
    __shared__ float4 columns[kWarps][32];
    __syncthreads();  // what the columns before had is read
    sums[Warp()] = result->sums;
    columns[Warp()][Lane()] = make_float4(result->o[0], result->o[1], result->o[2], result->o[3]);
    __syncthreads();
    const int first = Warp() / p_.joining * p_.joining;
    float top = -INFINITY;
    for (int i = 0; i < p_.joining; ++i) top = fmaxf(top, sums[first + i].max);
    const float reference = Reference(top, 1.0f);
    *result = {{top, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
    for (int i = 0; i < p_.joining; ++i) {
      const float factor = Exp2(sums[first + i].max - reference);
      result->sums.sum += sums[first + i].sum * factor;
      result->Add(columns[first + i][Lane()], factor);
    }
  }

  // One value from all lanes' values; all get it.
  template <typename Together>
  __device__ __forceinline__ static float OfWarp(float x, Together together) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = together(x, __shfl_xor_sync(~0u, x, step));
    return x;
  }

  const ShareParams& p_;
  const Line<kKeys, kThreads> line_;
  int row_, owner_, begins_, pieces_;
};

template <typename T, int kKeys>
__global__ void __launch_bounds__(Combine<T, kKeys>::kThreads, 3)
    AttentionCombine(const __grid_constant__ ShareParams p) {
  Combine<T, kKeys>(p).Run();
}

}  // namespace kvblock
