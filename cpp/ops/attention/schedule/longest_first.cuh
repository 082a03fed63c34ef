// The order of tiles of keys where query tiles list them: those that the most list come first.
//
// The longest walks begin first, so that CTAs end at about the same time. Lists tell how long one
// is, and they lie on the device, so every CTA ranks the tiles of its section by itself. In a
// section with more than kRanked of them each kRanked that follow one another are ranked among
// themselves.
#pragma once

#include <cstdint>

#include "ops/attention/contract/params.cuh"
#include "ops/attention/mask/sequence.cuh"
#include "ops/attention/schedule/grid_order.cuh"

namespace kvblock {

constexpr int kRanked = 512;

struct RankedTiles {
  int32_t keys[kRanked];  // larger of a tile that comes earlier; no two are alike
  int32_t found;
};

// The query tiles that list a tile of kTile keys, by all heads of its group.
template <int kTile>
__device__ __forceinline__ int ListedBy(const AttentionParams& p, const GridPlace& place) {
  const int member = place.pair / p.kv_heads;
  const int kv_head = p.first_kv_head + place.pair - member * p.kv_heads;
  const int64_t rows = (p.kv_len + p.tile_kv - 1) / p.tile_kv;
  const int64_t row = static_cast<int64_t>(place.tile) * kTile / p.tile_kv;
  int sum = 0;
#pragma unroll 4
  for (int head = kv_head * p.group; head < (kv_head + 1) * p.group; ++head) {
    const int count = __ldg(p.tile_counts_t + ListsOf(p, member, head) * rows + row);
    sum += min(max(count, 0), p.max_tiles_t);
  }
  return sum;
}

// The place of CTA (or cluster) `index`, in the order of FirstTilesFirst but for that. All kThreads
// threads call it together.
template <int kTile, int kThreads>
__device__ __forceinline__ GridPlace LongestFirst(const AttentionParams& p, unsigned index,
                                                  RankedTiles& ranked) {
  const unsigned section = p.tiles * p.section_pairs, from = index / section * section;
  const unsigned begin = from + (index - from) / kRanked * kRanked;
  const unsigned end =
      min(min(begin + kRanked, from + section), static_cast<unsigned>(p.tiles) * p.num_pairs);
  const int count = static_cast<int>(end - begin), own = static_cast<int>(index - begin);
  constexpr int kMostListed = INT32_MAX / kRanked - 1;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int listed = ListedBy<kTile>(p, FirstTilesFirst(p, begin + i));
    ranked.keys[i] = min(listed, kMostListed) * kRanked + kRanked - 1 - i;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int key = ranked.keys[i];
    int before = 0;
#pragma unroll 8
    for (int j = 0; j < count; ++j) before += ranked.keys[j] > key;
    if (before == own) ranked.found = i;
  }
  __syncthreads();
  return FirstTilesFirst(p, begin + ranked.found);
}

}  // namespace kvblock
