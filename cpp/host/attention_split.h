// The sizes of a call of the attention kernels for few queries.
#pragma once

#include <cstdint>

namespace kvblock {

// CTAs that a launch has at the most. The workspace is for so many, whatever the GPU: a program may
// be compiled where there is none.
constexpr int32_t kMostCtas = 320;

// Packed rows (queries of all heads that share a key head) in a tile, for so many.
inline int32_t TileRows(int64_t rows) { return rows <= 16 ? 16 : rows <= 32 ? 32 : 64; }

// Floats of what the pieces of so many CTAs come to.
inline int64_t PieceFloats(int32_t ctas, int32_t rows, int32_t value_dim) {
  return 2 * static_cast<int64_t>(ctas) * rows * (value_dim + 1);
}

}  // namespace kvblock
