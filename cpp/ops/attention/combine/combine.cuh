// Puts the pieces of units together that were cut between CTAs (schedule/shares.cuh).
//
//   lse = log2(sum_i 2^lse_i),   O = sum_i 2^(lse_i - lse) O_i,   then the sink
//
// CTA (c, r) looks at the border between the shares of CTAs c and c + 1: where it cuts a unit, and
// no border before it does, it combines row r of the unit's rows, in the order of the keys.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/attention/combine/result.cuh"
#include "ops/attention/mask/packed_rows.cuh"
#include "ops/attention/schedule/shares.cuh"

namespace kvblock {

template <typename T, int kKeys, int kThreads>
__global__ void __launch_bounds__(kThreads, 16)
    AttentionCombine(const __grid_constant__ ShareParams p) {
  const Line<kKeys, kThreads> line(p);
  const int cta = blockIdx.x + 1, border = line.Begin(cta);
  if (border >= line.total() || border == line.Begin(cta + 1)) return;
  const Place at = line.Find(border);
  const int first = border - at.tile;  // the unit's first tile
  const int owner = first < border ? line.Owner(first) : cta;
  // Of the borders that cut the unit, the first one counts: that of the CTA after its first owner.
  if (first == border || line.Begin(owner + 1) != border) return;
  const int row = blockIdx.y;
  const PackedRows packed(p, at.kv_head);
  if (at.rows.first_row + row >= packed.count) return;
  const int last = line.Owner(first + at.rows.tiles - 1);
  const auto slot = [&](int c) {
    const bool begins = c == owner && line.Begin(owner) < first;
    return static_cast<int64_t>(PieceSlot(c, !begins)) * p.rows + row;
  };
  float top = -INFINITY;
  for (int c = owner; c <= last; ++c) {
    if (line.Begin(c) < line.Begin(c + 1)) top = fmaxf(top, p.piece_lse[slot(c)]);
  }
  const float reference = Reference(top, 1.0f);
  for (int column = threadIdx.x * 4; column < p.value_dim; column += kThreads * 4) {
    PartialRow result = {{top, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
    for (int c = owner; c <= last; ++c) {
      if (line.Begin(c) == line.Begin(c + 1)) continue;
      const int64_t from = slot(c);
      const float weight = Exp2(p.piece_lse[from] - reference);
      result.sums.sum += weight;
      result.Add(*reinterpret_cast<const float4*>(p.piece_o + from * p.value_dim + column), weight);
    }
    if (top == -INFINITY) result.sums.sum = 0.0f;
    WriteRow<T>(p, at.rows.sequence, packed, at.rows.first_row + row, column, result);
  }
}

}  // namespace kvblock
