// What travels to the attention kernels: the caller's struct and a few derived numbers.
#pragma once

#include <cstdint>

#include "device/fast_math.cuh"
#include "kvblock/attention.h"

namespace kvblock {

// Lengths are at most kMaxLength. Then a position, also one in a tile that reaches past the end,
// plus a shift clamped to +-kFar stays inside int32 (mask.cuh).
constexpr int32_t kFar = 1 << 30, kMaxLength = kFar - 256;

struct AttentionParams : kvblock_attention {
  int32_t group;        // query heads to a KV head
  int32_t tiles;        // tiles along the queries (or keys) that the launch walks, of all sequences
  int32_t heads_apart;  // (batch member, head) pairs whose tiles are interleaved in the grid
  int32_t num_pairs;    // of (batch member, head)
  // With a softcap: from products to exponents of 2, where none is larger than the bound in size.
  TinySoftCap tiny_cap;
  float tiny_bound;
};

inline AttentionParams MakeAttentionParams(const kvblock_attention& a) {
  AttentionParams p{};
  static_cast<kvblock_attention&>(p) = a;
  p.group = a.num_heads / a.num_kv_heads;
  p.num_pairs = a.cu_q != nullptr ? a.num_heads : a.batch * a.num_heads;
  p.heads_apart = 1;
  if (a.softcap > 0.0f) {
    const float factor = a.scale / a.softcap, size = factor < 0.0f ? -factor : factor;
    const bool served = a.softcap < kLargeSoftcap && size <= kLargestFactor;
    p.tiny_cap = TinySoftCap(a.softcap * kLog2E, factor);
    p.tiny_bound = served ? kTinyTanh / size : -1.0f;
  }
  return p;
}

// Rows that a head has in the generic kernels' dq_accum: q's of all batch members, in whole blocks.
__host__ __device__ inline int64_t DqRows(const kvblock_attention& a) {
  const int64_t rows = a.cu_q != nullptr ? a.q_len : a.batch * a.q_len;
  return (rows + 7) / 8 * 8;
}

// Tiles of `rows` positions over all sequences along one side. Packed, every sequence may end in a
// partial tile, and so may the rows before the first sequence and after the last.
inline int64_t NumTiles(const kvblock_attention& a, int64_t length, int64_t rows) {
  const int64_t tiles = (length + rows - 1) / rows;
  return a.cu_q == nullptr ? tiles : tiles + a.batch + 1;
}

}  // namespace kvblock
