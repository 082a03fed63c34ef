// Tensor maps for the emulator: they hold what they were made of.
#pragma once

#include "ops/attention/hopper/tensor_map.h"

namespace kvblock::hopper {

// Whether maps can be of blocks. Each library has its own: inline variables are a process's.
static bool takes_blocks = true;

// As the driver does.
inline bool IsRefused(const CUtensorMap& map) {
  bool refused = reinterpret_cast<uintptr_t>(map.data) % 16 != 0;
  for (int i = 0; i < 5; ++i) {
    refused |= map.sizes[i] < 1 || map.sizes[i] > int64_t{1} << 32;
    refused |= map.box[i] < 1 || map.box[i] > 256;
    if (i > 0) refused |= map.strides[i] % 16 != 0 || map.strides[i] >= int64_t{1} << 40;
  }
  return refused;
}

const char* MakeTensorMap(const HeadArray& a, int rows, CUtensorMap* map, int heads) {
  const int bytes = IsNarrow(a) ? 1 : 2;
  *map = {static_cast<const char*>(a.data),
          {a.dim, a.heads, a.rows, a.batch, 1},
          {bytes, a.head_stride, a.row_stride, a.batch_stride, 0},
          {128 / bytes, heads, rows, 1, 1}};
  return IsRefused(*map) ? "the emulator refused a tensor map" : nullptr;
}
bool MakeTensorMap(const BlockArray& a, int rows, CUtensorMap* map) {
  const int bytes = IsNarrow(a) ? 1 : 2;
  *map = {static_cast<const char*>(a.data),
          {a.sizes[0], a.sizes[1], a.sizes[2], a.sizes[3], a.sizes[4]},
          {bytes, a.strides[0], a.strides[1], a.strides[2], a.strides[3]},
          {128 / bytes, 1, rows, 1, 1}};
  for (int i = 1; i < 5; ++i) {  // of one there is no next
    if (map->sizes[i] == 1) map->strides[i] = 16;
    if (map->strides[i] <= 0) return false;
  }
  return takes_blocks && !IsRefused(*map);
}

}  // namespace kvblock::hopper
