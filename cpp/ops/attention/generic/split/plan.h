// The parameters of a launch of the split kernels.
#pragma once

#include <cstdint>

#include "host/attention_workspace.h"
#include "ops/attention/schedule/shares.cuh"

namespace kvblock::generic {

inline ShareParams MakeShareParams(const AttentionCall& a, int32_t ctas) {
  ShareParams p{};
  static_cast<AttentionParams&>(p) = MakeAttentionParams(a);
  const int64_t rows = a.q_len * p.group;
  p.rows = TileRows(rows);
  p.row_tiles = static_cast<int32_t>((rows + p.rows - 1) / p.rows);
  p.ctas = ctas;
  float* const pieces = static_cast<float*>(a.workspace);
  p.piece_o = pieces;
  p.piece_lse = pieces + 2 * static_cast<int64_t>(ctas) * p.rows * a.value_dim;
  return p;
}

}  // namespace kvblock::generic
