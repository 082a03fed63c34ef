// Gradient of the bias, the same bits every time. Simple rather than fast.
//
// One CTA owns kTile x kTile elements of one row and head of the bias. For each batch member and
// head that reads them it computes, as the other backward kernels do,
//
//   S = Q K^T,  dP = dO V^T,  dS = P (dP - delta)
//
// and sums dS in registers: a warp has 16 queries and all keys of the tile. Each element is written
// once, zeros where nobody attends.
//
// Shared memory: Q, dO, K and V of one member.
#pragma once

#include <cstdint>

#include "device/shared.cuh"
#include "ops/attention/generic/product.cuh"
#include "ops/attention/generic/tile.cuh"
#include "ops/attention/mask/backward_scores.cuh"
#include "ops/attention/mask/dropout.cuh"
#include "ops/attention/mask/sequence.cuh"

namespace kvblock::generic {

template <typename T, int kDim>
struct BackwardBiasShape {
  static constexpr int kTile = 64, kThreads = 128;
  using Tile = TileOf<T, kTile, kDim>;
  static constexpr int kQ = 0, kDo = Tile::kBytes, kK = 2 * Tile::kBytes, kV = 3 * Tile::kBytes;
  static constexpr int kBytes = 4 * Tile::kBytes;
};

// Whether the listed tiles of this batch member and head hold (query, key). The whole warp looks.
__device__ __forceinline__ bool TileIsListed(const AttentionParams& p, int batch, int head,
                                             int query, int key) {
  if (p.tile_indices == nullptr) return true;
  const int64_t rows = (p.q_len + p.tile_q - 1) / p.tile_q;
  const int64_t list = ListsOf(p, batch, head) * rows + query / p.tile_q;
  const int count = min(p.tile_counts[list], p.max_tiles);
  bool listed = false;
  for (int i = threadIdx.x % 32; i < count; i += 32) {
    const int entry = p.tile_indices[list * p.max_tiles + i];
    const bool partial = p.tile_masks != nullptr && entry >= KVBLOCK_ATTENTION_PARTIAL;
    const int tile = partial ? entry - KVBLOCK_ATTENTION_PARTIAL : entry;
    listed = listed || tile == key / p.tile_kv;
  }
  return __any_sync(~0u, listed);
}

template <typename T, int kDim>
__global__ void __launch_bounds__(128, 1)
    AttentionBackwardBias(const __grid_constant__ DroppingParams p) {
  using Shape = BackwardBiasShape<T, kDim>;
  using Tile = typename Shape::Tile;
  constexpr int kTile = Shape::kTile, kThreads = Shape::kThreads, kN = kTile / 8;
  constexpr int kWide = 2;  // blocks of keys at a time, of float32: registers are few

  char* const shared = DynamicShared();
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp_row = thread / 32 * 16;
  const int group_row = lane / 4, pair_column = lane % 4 * 2;  // of a block of accumulators

  const int across = static_cast<int>((p.kv_len + kTile - 1) / kTile);
  const int k0 = blockIdx.x % p.tiles % across * kTile, q0 = blockIdx.x % p.tiles / across * kTile;
  const int bias_head = blockIdx.x / p.tiles % p.bias_heads;
  const int bias_row = blockIdx.x / p.tiles / p.bias_heads;
  const int members = p.batch / p.bias_batch, heads = p.bias_heads > 1 ? 1 : p.num_heads;

  float sum[1][kN][4];
  Clear(sum);
  for (int member = 0; member < members * heads; ++member) {
    const int batch = bias_row * members + member / heads;
    const int head = p.bias_heads > 1 ? bias_head : member % heads;
    const Sequence s = MakeSequence(p, batch);
    int first, end;
    s.VisibleKeys(q0, q0 + kTile, &first, &end);
    if (k0 >= end || k0 + kTile <= first || !TileIsListed(p, batch, head, q0, k0)) continue;

    const int kv_head = head / p.group;
    __syncthreads();  // everyone has left the member before
    LoadTileAsync<Tile, kThreads>(base + Shape::kQ,
                                  RowsOfHead<T>(p.q, s.q_row, p.num_heads, head, p.head_dim), q0,
                                  s.q_len, thread);
    LoadTileAsync<Tile, kThreads>(base + Shape::kDo,
                                  RowsOfHead<T>(p.d_o, s.q_row, p.num_heads, head, p.value_dim), q0,
                                  s.q_len, thread);
    LoadTileAsync<Tile, kThreads>(base + Shape::kK,
                                  RowsOfHead<T>(p.k, s.kv_row, p.num_kv_heads, kv_head, p.head_dim),
                                  k0, s.kv_len, thread);
    LoadTileAsync<Tile, kThreads>(
        base + Shape::kV, RowsOfHead<T>(p.v, s.kv_row, p.num_kv_heads, kv_head, p.value_dim), k0,
        s.kv_len, thread);
    CopyAsyncCommit();
    float lse[2] = {INFINITY, INFINITY}, delta[2] = {0.0f, 0.0f};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int query = q0 + warp_row + h * 8 + group_row;
      if (query < s.q_len) {
        const float raw = p.lse[s.LseRow(p, head) + query];
        lse[h] = RowLse(raw);
        delta[h] = RowDelta(raw, p.delta[s.LseRow(p, head) + query]);
      }
    }
    CopyAsyncWait<0>();
    __syncthreads();

    float prob[1][kN][4], dp[1][kN][4];
    Clear(prob);
    Clear(dp);
    Product<T, kDim / kStep<T>, kWide>(prob,
                                       OperandA<Tile, Lies::kAcross>{base + Shape::kQ, warp_row},
                                       OperandB<Tile, Lies::kAcross>{base + Shape::kK, 0}, lane);
    Product<T, kDim / kStep<T>, kWide>(dp,
                                       OperandA<Tile, Lies::kAcross>{base + Shape::kDo, warp_row},
                                       OperandB<Tile, Lies::kAcross>{base + Shape::kV, 0}, lane);
    const Scores<T> scores(p, s, head, q0, k0);
    const bool drops = p.dropout.keys != nullptr;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int at_lane = Opaque(lane);
      float (&c)[4] = prob[0][n], slope[4];  // slope: of the score by q.k; the bias comes after it
      scores.Probabilities(c, q0 + warp_row + at_lane / 4, k0 + n * 8 + at_lane % 4 * 2, lse,
                           slope);
      if (drops) {
        PairDropout(p, s, head, q0 + warp_row, k0, at_lane).Drop(dp[0][n], 0, n);
#pragma unroll
        for (int e = 0; e < 4; ++e) dp[0][n][e] *= p.dropout.scale;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (c[e] != 0.0f) sum[0][n][e] += c[e] * (dp[0][n][e] - delta[e / 2]);
      }
    }
  }

#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t query = q0 + warp_row + e / 2 * 8 + group_row;
      const int64_t key = k0 + n * 8 + pair_column + e % 2;
      if (query >= p.q_len || key >= p.kv_len) continue;
      const int64_t at =
          ((static_cast<int64_t>(bias_row) * p.bias_heads + bias_head) * p.q_len + query) *
              p.kv_len +
          key;
      if (kIsFloat32<T> || p.bias_dtype == KVBLOCK_F32) {
        static_cast<float*>(p.dbias)[at] = sum[0][n][e];
      } else {
        static_cast<T*>(p.dbias)[at] = static_cast<T>(sum[0][n][e]);
      }
    }
  }
}

}  // namespace kvblock::generic
