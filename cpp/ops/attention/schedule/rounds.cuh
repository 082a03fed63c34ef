// How the query tiles of a forward launch are shared out among CTAs that stay: the order of tiles,
// and who has which.
#pragma once

#include <cstdint>

#include "device/opaque.cuh"
#include "ops/attention/contract/params.cuh"

namespace kvblock {

// How query tiles are shared out among CTAs.
//
// Tiles are ordered in sections of `section_pairs` (batch member, head) pairs, whose K and V fit in
// L2 together; within a section the pairs take turns, the last tiles first: under a causal mask
// they are the longest.
//
// With a counter, which begins with 0, a CTA that is done takes the next tile of this order. Each
// tile is counted once, also the CTAs' first ones. Without, a round gives each CTA the next tile.
// With `section_rounds`, for causal masks, sections begin with a round, and rounds go back and
// forth over the CTAs, which shares the work out to a few per mille.
struct ForwardParams : AttentionParams {
  unsigned* counter;       // in global memory, or NULL
  int32_t section_rounds;  // rounds that a section takes; 0: sections follow each other
  // CTAs of a cluster have the same tile of neighbouring heads, which share K and V, instead of
  // neighbouring tiles of a head. Then `num_pairs` and `section_pairs` count clusters' heads.
  bool cluster_heads;
};

struct Assignment {
  enum { kTile, kNone, kEnd } is;
  int pair, tile;
};
// `tiles` are those of a pair: p.tiles, or fewer.
__device__ __forceinline__ Assignment Assign(const ForwardParams& p, int tiles, int section,
                                             int index) {
  const int pairs = min(Opaque(p.section_pairs), p.num_pairs - section * p.section_pairs);
  if (index >= pairs * tiles) return {Assignment::kNone};
  return {Assignment::kTile, section * p.section_pairs + index % pairs, tiles - 1 - index / pairs};
}
// The tile at a place in the order, of which there are fewer than 2^31.
__device__ __forceinline__ Assignment AssignInOrder(const ForwardParams& p, int tiles,
                                                    unsigned index) {
  if (index >= static_cast<unsigned>(tiles) * p.num_pairs) return {Assignment::kEnd};
  const int size = Opaque(p.section_pairs) * tiles, section = static_cast<int>(index) / size;
  return Assign(p, tiles, section, static_cast<int>(index) - section * size);
}
// The tile of CTA `cta` of `grid` (or of a cluster) in a round.
__device__ __forceinline__ Assignment AssignInRounds(const ForwardParams& p, int tiles, int round,
                                                     int cta, int grid) {
  if (p.section_rounds == 0) {
    return AssignInOrder(p, tiles, static_cast<unsigned>(round) * grid + cta);
  }
  const int section = round / Opaque(p.section_rounds);
  if (section * p.section_pairs >= p.num_pairs) return {Assignment::kEnd};
  round -= section * p.section_rounds;
  return Assign(p, tiles, section,
                round * grid + ((section + round) % 2 != 0 ? grid - 1 - cta : cta));
}

}  // namespace kvblock
