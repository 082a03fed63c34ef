// The sizes of a launch of the split kernels: how many rows are computed together, and the memory
// for what pieces come to.
#pragma once

#include <cstdint>

#include "ops/attention/schedule/shares.cuh"

namespace kvblock {

// Blocks of 16 packed rows in a tile, for so many rows of a member and key head.
inline int TileBlocks(int64_t rows) { return rows <= 16 ? 1 : rows <= 32 ? 2 : 4; }

inline ShareParams MakeShareParams(const kvblock_attention& a, int32_t ctas, float* pieces) {
  ShareParams p{};
  static_cast<AttentionParams&>(p) = MakeAttentionParams(a);
  const int64_t rows = a.q_len * p.group;
  p.rows = 16 * TileBlocks(rows);
  p.row_tiles = static_cast<int32_t>((rows + p.rows - 1) / p.rows);
  p.ctas = ctas;
  p.piece_lse = pieces;
  p.piece_o = pieces + 2 * static_cast<int64_t>(ctas) * p.rows;
  return p;
}

// Floats of that memory.
inline int64_t PieceFloats(int32_t ctas, int32_t rows, int32_t value_dim) {
  return 2 * static_cast<int64_t>(ctas) * rows * (value_dim + 1);
}

}  // namespace kvblock
