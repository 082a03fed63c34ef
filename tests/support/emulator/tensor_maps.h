// Tensor maps for the emulator: they hold what they were made of.
#pragma once

#include "ops/attention/hopper/tensor_map.h"

namespace kvblock::hopper {

// Whether maps can be of blocks. Each library has its own: inline variables are a process's.
static bool takes_blocks = true;

const char* MakeTensorMap(const HeadArray& a, int rows, CUtensorMap* map, int heads) {
  const int bytes = a.dtype == KVBLOCK_E4M3 ? 1 : 2;
  *map = {static_cast<const char*>(a.data),
          {a.dim, a.heads, a.rows, a.batch, 1},
          {bytes, a.head_stride, a.row_stride, a.batch_stride, 0},
          {128 / bytes, heads, rows, 1, 1}};
  return nullptr;
}
bool MakeTensorMap(const BlockArray& a, int rows, CUtensorMap* map) {
  const int bytes = a.dtype == KVBLOCK_E4M3 ? 1 : 2;
  *map = {static_cast<const char*>(a.data),
          {a.sizes[0], a.sizes[1], a.sizes[2], a.sizes[3], a.sizes[4]},
          {bytes, a.strides[0], a.strides[1], a.strides[2], a.strides[3]},
          {128 / bytes, 1, rows, 1, 1}};
  return takes_blocks;
}

}  // namespace kvblock::hopper
