// Gradient of queries, the same bits every time, on tensor cores of sm_80 and newer.
//
// One CTA owns kQueries queries of one head and walks over the tiles of kKeys keys that they see:
//
//   S  = Q K^T       [kQueries, kKeys]     P  = exp(scale S - lse)
//   dP = dO V^T      [kQueries, kKeys]     dS = P (dP - delta)
//   dQ += dS K       [kQueries, kDim]      times scale at the end
//
// With dropout dP is 0 of pairs that are dropped, and dS is summed up times 1 - rate.
//
// A warp owns 16 queries throughout, so dS turns into the next product's operand in its registers
// and warps meet only where a tile of keys changes.
//
// Shared memory: Q and dO; K and V in two stages, the next tile arriving under this one's products.
// At the end dQ passes through the place of Q, to be written in whole rows.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/shared.cuh"
#include "ops/attention/generic/product.cuh"
#include "ops/attention/generic/tile.cuh"
#include "ops/attention/mask/backward_scores.cuh"
#include "ops/attention/mask/dropout.cuh"
#include "ops/attention/mask/tile_walk.cuh"

namespace kvblock::generic {

template <typename T, int kDim>
struct BackwardQShape {
  static constexpr int kRowBytes = kDim * sizeof(T);
  static constexpr int kQueries = kRowBytes <= 256 ? 128 : 64,
                       kKeys = kRowBytes <= 384 && !kSumsApart<T> ? 64 : 32;
  static constexpr int kThreads = kQueries / 16 * 32;
  using QueryTile = TileOf<T, kQueries, kDim>;
  using KeyTile = TileOf<T, kKeys, kDim>;
  static constexpr int kQ = 0, kDo = QueryTile::kBytes, kK = kDo + QueryTile::kBytes;
  static constexpr int kV = kK + 2 * KeyTile::kBytes, kBytes = kV + 2 * KeyTile::kBytes;
  static_assert(kBytes <= 163 * 1024);
};

// Accumulators [16, 8 kN], rounded, as the A operand of a product that sums over their columns.
template <typename T, int kN>
struct RegistersA {
  const float (&c)[1][kN][4];

  template <int kM>
  __device__ __forceinline__ void LoadRows(uint32_t (&r)[kM][4], int /*lane*/, int k) const {
    static_assert(kM == 1);
    constexpr int kBlocks = kStep<T> / 8;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) TakeAccumulators<T>(r[0], n, c[0][kBlocks * k + n]);
  }
};

template <typename T, int kDim>
__global__ void __launch_bounds__(BackwardQShape<T, kDim>::kThreads, 1)
    AttentionBackwardQ(const __grid_constant__ DroppingParams p) {
  using Shape = BackwardQShape<T, kDim>;
  using QueryTile = typename Shape::QueryTile;
  using KeyTile = typename Shape::KeyTile;
  constexpr int kQueries = Shape::kQueries, kKeys = Shape::kKeys, kThreads = Shape::kThreads;
  constexpr int kN = kKeys / 8, kWide = 2;  // of float32: blocks of keys at a time

  char* const shared = DynamicShared();
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp_row = thread / 32 * 16;
  const int group_row = lane / 4, pair_column = lane % 4 * 2;  // of a block of accumulators

  // The last tiles first: under a causal mask they see the most keys.
  const int tile = p.tiles - 1 - blockIdx.x % p.tiles, owner = blockIdx.x / p.tiles;
  const int head = owner % p.num_heads, kv_head = head / p.group;
  Sequence s;
  int q0;
  if (!FindTile<Along::kQueries, kQueries>(p, owner / p.num_heads, tile, &s, &q0)) return;

  const HeadRows k_rows = RowsOfHead<T>(p.k, s.kv_row, p.num_kv_heads, kv_head, p.head_dim);
  const HeadRows v_rows = RowsOfHead<T>(p.v, s.kv_row, p.num_kv_heads, kv_head, p.value_dim);
  const auto load = [&](int stage, int first) {
    LoadTileAsync<KeyTile, kThreads>(base + Shape::kK + stage * KeyTile::kBytes, k_rows, first,
                                     s.kv_len, thread);
    LoadTileAsync<KeyTile, kThreads>(base + Shape::kV + stage * KeyTile::kBytes, v_rows, first,
                                     s.kv_len, thread);
  };

  // Rows do not meet here, so those from q_len on may come out as they like: they are not written.
  TileWalk<Along::kKeys, kKeys> walk(p, s, head, q0, min(q0 + kQueries, s.q_len));
  bool more = walk.Next();
  float lse[2] = {INFINITY, INFINITY}, delta[2] = {0.0f, 0.0f};
  if (more) {
    LoadTileAsync<QueryTile, kThreads>(base + Shape::kQ,
                                       RowsOfHead<T>(p.q, s.q_row, p.num_heads, head, p.head_dim),
                                       q0, s.q_len, thread);
    LoadTileAsync<QueryTile, kThreads>(
        base + Shape::kDo, RowsOfHead<T>(p.d_o, s.q_row, p.num_heads, head, p.value_dim), q0,
        s.q_len, thread);
    load(0, walk.first());
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int query = q0 + warp_row + h * 8 + group_row;
      if (query < s.q_len) {
        const float raw = p.lse[s.LseRow(p, head) + query];
        lse[h] = RowLse(raw);
        delta[h] = RowDelta(raw, p.delta[s.LseRow(p, head) + query]) * p.dropout.kept;
      }
    }
  }

  float dq[1][kDim / 8][4];
  Clear(dq);
  for (int stage = 0; more; stage ^= 1) {
    CopyAsyncCommit();
    CopyAsyncWait<0>();
    __syncthreads();  // this tile has landed, and everyone has left the one before
    const int k0 = walk.first();
    const bool plain =
        walk.all_visible() && p.softcap == 0.0f && p.bias == nullptr && p.dropout.keys == nullptr;
    more = walk.Next();
    if (more) load(stage ^ 1, walk.first());
    const uint32_t k = base + Shape::kK + stage * KeyTile::kBytes;
    const uint32_t v = base + Shape::kV + stage * KeyTile::kBytes;

    // S = Q K^T and dP - delta = dO V^T - delta; with dropout both are 1 - rate times that.
    float prob[1][kN][4], ds[1][kN][4];
    Clear(prob);
    Product<T, kDim / kStep<T>, kWide>(
        prob, OperandA<QueryTile, Lies::kAcross>{base + Shape::kQ, warp_row},
        OperandB<KeyTile, Lies::kAcross>{k, 0}, lane);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) ds[0][n][e] = -delta[e / 2];
    }
    Product<T, kDim / kStep<T>, kWide>(
        ds, OperandA<QueryTile, Lies::kAcross>{base + Shape::kDo, warp_row},
        OperandB<KeyTile, Lies::kAcross>{v, 0}, lane);

    // dS.
    if (plain) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) ds[0][n][e] *= Probability(prob[0][n][e], p.scale, lse[e / 2]);
      }
    } else {
      // Of all blocks, and in front: beside them nothing of it is kept in registers.
      if (p.dropout.keys != nullptr) {
        const PairDropout drops(p, s, head, q0 + warp_row, k0, Opaque(lane));
#pragma unroll
        for (int n = 0; n < kN; ++n) drops.Replace(ds[0][n], 0, n, {-delta[0], -delta[1]});
      }
      const Scores<T> scores(p, s, head, q0, k0);
      const auto finish = [&](auto softcap) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          const int at_lane = Opaque(static_cast<int>(threadIdx.x)) % 32;
          float (&c)[4] = prob[0][n], slope[4];
          scores.template Probabilities<decltype(softcap)::value>(
              c, q0 + warp_row + at_lane / 4, k0 + n * 8 + at_lane % 4 * 2, lse, slope);
#pragma unroll
          for (int e = 0; e < 4; ++e) {  // masked: not even a NaN
            ds[0][n][e] = c[e] == 0.0f ? 0.0f : c[e] * slope[e] * ds[0][n][e];
          }
        }
      };
      if (p.softcap > 0.0f) {
        finish(std::true_type());
      } else {
        finish(std::false_type());
      }
    }

    // dQ += dS K.
    AddProduct<T, kKeys / kStep<T>>(dq, RegistersA<T, kN>{ds}, OperandB<KeyTile, Lies::kDown>{k, 0},
                                    lane);
  }

  // Out through the place of Q. Rows that take no part are zero.
  __syncthreads();
  const float scale = p.scale * p.dropout.scale;
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp_row + h * 8 + group_row;
      if constexpr (kIsFloat32<T>) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = ColumnDown<kWideOf<kDim / 8>>(lane, n, e);
          *reinterpret_cast<float*>(shared + Shape::kQ + QueryTile::Offset(row, column)) =
              q0 + row < s.q_len ? dq[0][n][2 * h + e] * scale : 0.0f;
        }
      } else {
        const uint32_t value = Pack<T>(dq[0][n][2 * h] * scale, dq[0][n][2 * h + 1] * scale);
        const uint32_t at = QueryTile::Offset(row, n * 8) + pair_column * 2;
        *reinterpret_cast<uint32_t*>(shared + Shape::kQ + at) = q0 + row < s.q_len ? value : 0;
      }
    }
  }
  __syncthreads();
  StoreTile<QueryTile, kThreads, sizeof(T)>(
      shared + Shape::kQ, RowsOfHead<T>(p.dq, s.q_row, p.num_heads, head, p.head_dim), q0, s.q_rows,
      thread);
}

}  // namespace kvblock::generic
