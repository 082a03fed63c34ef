// How the Hopper backward kernels lay out dq_accum.
//
// It has the heads of one launch, which may be some of all (DqKvHeads in attention_workspace.h).
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
//
// A tall launch (head_dim 128) has dQ transposed. Each head's part of the same array is then
// [2, 8 tiles, 4, 8, 4, 2, 2]: half of the columns, block of 8 queries, warp, g, t, h and e, which
// is column 64 half + 16 warp + 8 h + g and query 2 t + e of the block. So any number of blocks of
// a half is one piece.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/attention_workspace.h"
#include "ops/attention/hopper/backward/tiles.h"
#include "ops/attention/mask/sequence.cuh"

namespace kvblock::hopper {

// Whether the score of every pair that attends is scale q k.
inline bool IsPlain(const AttentionCall& a) { return a.softcap == 0.0f && a.bias == nullptr; }
// Whether LaunchBackwardKv takes 80 queries at a time and lays out dq_accum for that: where the
// empty rows of first tiles, and what tiles on the diagonal compute in vain, are little.
inline bool LaunchIsTall(const AttentionCall& a) {
  constexpr int64_t kEnough = 2048, kEnoughMasked = 4096;
  const int64_t queries = a.cu_q != nullptr ? a.q_len / std::max(a.batch, 1) : a.q_len;
  return a.head_dim == 128 && a.value_dim <= 128 && IsPlain(a) && a.tile_indices == nullptr &&
         a.dq_turns == nullptr && a.window_left < 0 && a.dropout == 0 &&
         queries >= (a.window_right < 0 ? kEnough : kEnoughMasked);
}

// The number of the tile of a query.
__device__ __forceinline__ int64_t DqTileNumber(const AttentionParams& p, const Sequence& s,
                                                int head, int query) {
  const int own = head - p.first_kv_head * p.group;  // among the launch's heads
  const int64_t sequence =
      p.cu_q != nullptr ? own * DqTiles(p) + (s.q_row + int64_t{kDqRows} * s.batch) / kDqRows
                        : (static_cast<int64_t>(s.batch) * p.kv_heads * p.group + own) * DqTiles(p);
  return sequence + query / kDqRows;
}
__device__ __forceinline__ float* DqTile(const AttentionParams& p, const Sequence& s, int head,
                                         int first) {
  return p.dq_accum + DqTileNumber(p, s, head, first) * (kDqRows * p.head_dim);
}
// Tall: the block of 8 queries that begins with `first`, of the columns from 64 half on.
constexpr int kTallBlock = 8 * 64;  // values
__device__ __forceinline__ float* DqTallBlock(const AttentionParams& p, const Sequence& s, int head,
                                              int first, int half) {
  const int64_t tiles = DqTiles(p), tile = DqTileNumber(p, s, head, 0);
  const int own = head - p.first_kv_head * p.group;
  const int64_t before = p.cu_q != nullptr ? own * tiles : tile;  // tiles of the heads before
  const int64_t block = (before * 2 + half * tiles + (tile - before)) * (kDqRows / 8) + first / 8;
  return p.dq_accum + block * kTallBlock;
}
__device__ __forceinline__ int32_t* DqTurn(const AttentionParams& p, const Sequence& s, int head,
                                           int first) {
  return p.dq_turns + DqTileNumber(p, s, head, first);
}

}  // namespace kvblock::hopper
