// Host-side helpers that both launchers share: the bounds check, and the "lowering" of a copy to
// the widest element that all of its addresses allow.
#ifndef KVBLOCK_HOST_BLOCK_COPY_CHECK_H_
#define KVBLOCK_HOST_BLOCK_COPY_CHECK_H_

#include "kvblock/block_copy.h"

namespace kvblock {

// The product of dims: 0 for an empty copy.
int64_t NumCoordinates(const kvblock_copy& copy);

// The widest unit, up to 16 bytes, that divides a run and every address of one side.
int64_t CommonUnit(const kvblock_side& side, int64_t rank, int64_t run_bytes);

// Drops dims of extent 1, merges neighbours that both sides walk in one stride, and widens the
// unit to `max_unit` bytes where runs, strides, offsets and base addresses allow it. Dim 0 is kept
// apart when ids are indexed by it.
kvblock_copy Simplify(const kvblock_copy& copy, int64_t max_unit);

}  // namespace kvblock

#endif  // KVBLOCK_HOST_BLOCK_COPY_CHECK_H_
