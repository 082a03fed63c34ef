// What Hopper's forward kernel is told when keys lie in the blocks of a cache.
//
// It computes the sequences with more than `most_rows` packed rows. The query heads that share a
// key head, or `pack` of them, are rows of one tile: as many of its 128 rows as possible have a
// query, also where there are fewer queries than rows. `tiles` of AttentionParams counts nothing
// here, and pairs are units: `pack` heads each.
#pragma once

#include <cstdint>

#include "device/fast_div.cuh"
#include "ops/attention/schedule/pages.cuh"

namespace kvblock::hopper {

struct PagedForwardParams : PagedParams {
  FastDiv by_pack;
  int32_t queries;   // of a tile
  int32_t kv_units;  // that share a key head
  bool follows;      // begins while the launch for the other sequences runs
  int32_t box_rows;  // K and V come as boxes of so many rows; 0: row by row
  // Items that there may be where keys are shared out (pieces.cuh), 0 for none; what they come to,
  // and how many pieces of a tile each consumer has left, which begins with 0.
  int32_t most_pieces;
  float* pieces;
  int32_t* arrived;
};

// The same of 8 bits: what the launches in front of the kernel make (narrow_pages.cuh).
struct NarrowPagedForwardParams : PagedForwardParams {
  // As q lies, but that a tile's rows are nobody else's: those beyond its sequence are zeros.
  // Otherwise a row's bits would depend on what follows its sequence. NarrowRow says where a row
  // is.
  uint8_t* narrow_q;
  float* q_scales;  // [rows of all calls, units], of the tile that begins with a row
  uint8_t* values;  // V^T: [members, key heads, value_dim, padded_keys]
  int64_t padded_keys;
};

__device__ __forceinline__ int NarrowRow(const NarrowPagedForwardParams& p, int member, int q_row) {
  return q_row + member * p.queries;
}

// The scale of a key head, of those of a cache that has no scales of tokens.
__device__ __forceinline__ float HeadScale(const ScaleStrides& s, int head) {
  return s.data != nullptr ? __ldg(s.data + s.head * head) : 1.0f;
}

}  // namespace kvblock::hopper
