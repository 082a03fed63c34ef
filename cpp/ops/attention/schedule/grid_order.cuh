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
  int nth;  // so many tiles of the pair come before it
};

// The place of CTA (or cluster) `index`, the first tiles first: of keys they are the longest under
// a causal mask. `backwards`: the last tiles first.
__device__ __forceinline__ GridPlace FirstTilesFirst(const AttentionParams& p, unsigned index,
                                                     bool backwards = false) {
  const int section = p.tiles * p.section_pairs, first = index / section * p.section_pairs;
  const int pairs = min(p.section_pairs, p.num_pairs - first);
  const int nth = index % section / pairs, tile = backwards ? p.tiles - 1 - nth : nth;
  const int pair = first + index % section % pairs;
  return {pair, tile, nth};
}

// The last tiles first: of queries they are the longest under a causal mask.
__device__ __forceinline__ GridPlace LastTilesFirst(const AttentionParams& p, unsigned index) {
  const int section = index / (p.section_pairs * p.tiles);
  const int rest = index - section * p.section_pairs * p.tiles;
  const int pairs = min(p.section_pairs, p.num_pairs - section * p.section_pairs);
  const int nth = rest / pairs, tile = p.tiles - 1 - nth;
  return {section * p.section_pairs + rest % pairs, tile, nth};
}

}  // namespace kvblock
