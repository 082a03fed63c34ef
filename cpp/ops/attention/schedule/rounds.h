// How many heads make a section of a forward launch whose CTAs take tiles in rounds (rounds.cuh).
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/attention/contract/params.cuh"
#include "ops/attention/schedule/grid.h"

namespace kvblock {

// K and V of the heads that take turns under a causal mask. Every miss of L2, and every trip from
// one of its halves to the other, costs power that the clock then lacks: less than fits is better.
constexpr int64_t kForwardSectionBytes = int64_t{16} << 20;

// How many heads make a section of rounds: of those whose K and V lie in L2 together, the number
// that leaves the fewest CTAs without a tile in its last round; at least about a round's worth.
inline int32_t SectionHeads(const AttentionParams& p, int64_t clusters, int heads_at_once) {
  const int64_t least = std::clamp<int64_t>(clusters / p.tiles, 1, p.num_pairs);
  const int64_t most =
      std::max<int64_t>(SectionPairs(p, kForwardSectionBytes) / heads_at_once, least);
  const auto filled = [&](int64_t heads) {
    const int64_t items = heads * p.tiles, rounds = (items + clusters - 1) / clusters;
    return static_cast<double>(items) / static_cast<double>(rounds * clusters);
  };
  int64_t best = most;
  for (int64_t heads = most - 1; filled(best) < 0.98 && heads >= std::max(least, most / 2);
       --heads) {
    if (filled(heads) > filled(best)) best = heads;
  }
  return static_cast<int32_t>(best);
}

}  // namespace kvblock
