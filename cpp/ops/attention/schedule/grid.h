// Grids of launches that have a CTA for each tile: how many tiles, and how many heads of them lie
// side by side in the grid.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "host/message.h"
#include "ops/attention/contract/params.cuh"

namespace kvblock {

// Tiles of `rows` positions over all sequences along one side. Packed, every sequence may end in a
// partial tile, and so may the rows before the first sequence and after the last.
inline int64_t NumTiles(const AttentionCall& a, int64_t length, int64_t rows) {
  const int64_t tiles = (length + rows - 1) / rows;
  return a.cu_q == nullptr ? tiles : tiles + a.batch + 1;
}

// Fills in the grid, tiles * owners CTAs; NULL or what is wrong.
inline const char* PlanGrid(AttentionParams* p, int64_t tiles, int64_t owners) {
  if (owners > 0 && tiles > INT32_MAX / owners) {
    return Message("attention: " + std::to_string(tiles) + " tiles for each of " +
                   std::to_string(owners) +
                   " heads are more than one launch can have; split the batch");
  }
  p->tiles = static_cast<int32_t>(tiles);
  p->num_pairs = static_cast<int32_t>(owners);
  return nullptr;
}

// What heads that take turns in the grid read should fit in L2 together (an H100 has 50 MiB).
constexpr int64_t kSectionBytes = int64_t{32} << 20;

// Heads whose query tiles take turns in the grid: as many as have `fit` bytes of K and V. More of
// them balance the end of a causal launch.
inline int32_t SectionPairs(const AttentionParams& p, int64_t fit = kSectionBytes) {
  const int64_t bytes = int64_t{2} * p.kv_len * (p.head_dim + p.value_dim);
  const int64_t kv_heads = fit / std::max<int64_t>(bytes, 1);
  return static_cast<int32_t>(std::clamp<int64_t>(kv_heads * p.group, 1, p.num_pairs));
}

// The same for the owners of a backward grid, of which each reads so many bytes.
inline int32_t SectionOwners(const AttentionParams& p, int64_t bytes) {
  const int64_t fit = kSectionBytes / std::max<int64_t>(bytes, 1);
  return static_cast<int32_t>(std::clamp<int64_t>(fit, 1, std::max(p.num_pairs, 1)));
}

}  // namespace kvblock
