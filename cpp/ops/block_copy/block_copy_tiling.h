// Which dims of a copy make the box of a tile (see block_copy_tile.cuh).
#ifndef KVBLOCK_OPS_BLOCK_COPY_TILING_H_
#define KVBLOCK_OPS_BLOCK_COPY_TILING_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvblock/block_copy.h"

namespace kvblock {

// A copy whose dims `box` are the box of a tile. An empty box: tiles do not serve this copy.
struct Tiling {
  kvblock_copy copy;
  std::vector<int> box;
  int64_t bytes;  // of the box

  bool Has(int k) const;
  // The bytes of the box that one side holds in a row, from its innermost dim on.
  int64_t Segment(const kvblock_side& side) const;
  // The widest vector that stays inside a segment and is aligned wherever the box starts.
  int64_t Width(const kvblock_side& side) const;

  // While the box grows:
  bool MayTake(int k) const;
  int64_t Take(int k, int64_t limit);
  void Split(int k, int64_t factor);
  void Lengthen(const kvblock_side& side, int64_t limit);
};

// The box of at most `target` bytes and `max_rank` dims that gives both sides the longest segments.
Tiling ChooseTiling(const kvblock_copy& copy, int64_t target, size_t max_rank);

}  // namespace kvblock

#endif  // KVBLOCK_OPS_BLOCK_COPY_TILING_H_
