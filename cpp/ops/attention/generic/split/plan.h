// The parameters of a launch of the split kernels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/attention_workspace.h"
#include "ops/attention/schedule/shares.cuh"

namespace kvblock::generic {

// How many warps put a row together: each has about three pieces. A unit has most where all are
// alike.
inline int32_t WarpsThatJoin(int64_t units, int32_t ctas) {
  const int64_t pieces = ctas / std::max<int64_t>(units, 1) + 2;
  return pieces < 6 ? 1 : pieces < 12 ? 2 : pieces < 24 ? 4 : 8;
}

inline ShareParams MakeShareParams(const AttentionCall& a, int32_t ctas) {
  ShareParams p{};
  static_cast<AttentionParams&>(p) = MakeAttentionParams(a);
  const int64_t rows = a.q_len * p.group;
  p.rows = TileRows(rows);
  p.row_tiles = static_cast<int32_t>((rows + p.rows - 1) / p.rows);
  p.ctas = ctas;
  p.joining = WarpsThatJoin(int64_t{a.batch} * p.row_tiles * a.num_kv_heads, ctas);
  float* const pieces = static_cast<float*>(a.workspace);
  p.piece_o = pieces;
  p.piece_lse = pieces + 2 * static_cast<int64_t>(ctas) * p.rows * a.value_dim;
  return p;
}

}  // namespace kvblock::generic
