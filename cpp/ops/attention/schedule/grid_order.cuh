// Which tile a CTA has, in a grid that has a CTA for each tile of each pair.
//
// A pair is a batch member and a head (of keys: a KV head). The grid goes through sections of
// `section_pairs` pairs, whose operands fit in L2 together. Within a section the pairs take turns:
// the first tile of each, then the second of each. So the longest tiles begin first, and the short
// tiles of several pairs fill the end of the launch.
#pragma once

#include "ops/attention/contract/params.cuh"

namespace kvblock {

struct GridPlace {
  int pair, tile;
};

// The place of CTA (or cluster) `index`, the first tiles first: of keys they are the longest under
// a causal mask.
__device__ __forceinline__ GridPlace FirstTilesFirst(const AttentionParams& p, unsigned index) {
  const int section = p.tiles * p.section_pairs, first = index / section * p.section_pairs;
  const int pairs = min(p.section_pairs, p.num_pairs - first);
  return {static_cast<int>(first + index % section % pairs),
          static_cast<int>(index % section / pairs)};
}

// The last tiles first: of queries they are the longest under a causal mask.
__device__ __forceinline__ GridPlace LastTilesFirst(const AttentionParams& p, unsigned index) {
  const int section = index / (p.section_pairs * p.tiles);
  const int rest = index - section * p.section_pairs * p.tiles;
  const int pairs = min(p.section_pairs, p.num_pairs - section * p.section_pairs);
  return {section * p.section_pairs + rest % pairs, p.tiles - 1 - rest / pairs};
}

}  // namespace kvblock
