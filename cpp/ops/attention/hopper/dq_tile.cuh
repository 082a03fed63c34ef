// How the Hopper backward kernels lay out dq_accum.
//
// Tiles of 64 queries of one head, each [head_dim / 8, 4, 8, 4, 2, 2] float32: block of 8 columns,
// warp, g, t, h and e. That is query 16 warp + 8 h + g and column 2 t + e of the block: what a
// thread of a warpgroup holds of a block (wgmma.cuh) are four neighbours, what a warp holds 512
// bytes.
//
// Seen as an array [B, N, tiles, head_dim / 8, 4, 8, 4, 2, 2], its transpose (0, 2, 4, 7, 5, 1, 3,
// 6, 8) is [B, 64 tiles, N, head_dim].
//
// The tiles are [B, N, ceil(T / 64)]. Packed they are [N, (T + 64 B) / 64], rounded down, and the
// first of sequence b is number (cu_q[b] + 64 b) / 64, rounded down: there is room, because a
// sequence of n rows has at most n / 64 + 1 tiles.
#pragma once

#include <cstdint>

#include "ops/attention/common/mask.cuh"

namespace kvblock::hopper {

constexpr int kDqRows = KVBLOCK_ATTENTION_DQ_ROWS;

// Tiles of one head.
__host__ __device__ inline int64_t DqTiles(const kvblock_attention& a) {
  return a.cu_q != nullptr ? (a.q_len + int64_t{kDqRows} * a.batch) / kDqRows
                           : (a.q_len + kDqRows - 1) / kDqRows;
}

// The number of the tile of query `first`, a multiple of 64.
__device__ __forceinline__ int64_t DqTileNumber(const AttentionParams& p, const Sequence& s,
                                                int head, int first) {
  const int64_t sequence =
      p.cu_q != nullptr ? head * DqTiles(p) + (s.q_row + int64_t{kDqRows} * s.batch) / kDqRows
                        : (static_cast<int64_t>(s.batch) * p.num_heads + head) * DqTiles(p);
  return sequence + first / kDqRows;
}
__device__ __forceinline__ float* DqTile(const AttentionParams& p, const Sequence& s, int head,
                                         int first) {
  return p.dq_accum + DqTileNumber(p, s, head, first) * (kDqRows * p.head_dim);
}
__device__ __forceinline__ int32_t* DqTurn(const AttentionParams& p, const Sequence& s, int head,
                                           int first) {
  return p.dq_turns + DqTileNumber(p, s, head, first);
}

}  // namespace kvblock::hopper
