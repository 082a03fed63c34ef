// Tensor maps: how the copy engine sees q, k, v and their like.
#pragma once

#include <cuda.h>

#include "ops/attention/contract/head_array.h"

namespace kvblock::hopper {

// A map whose box is 64 columns (fewer where dim is less than 64: the rest comes as zeros) of
// `rows` rows of one head of one batch member, at coordinates (column, head, row, batch), written
// to shared memory with the 128-byte swizzle. NULL, or what is wrong.
const char* MakeTensorMap(const HeadArray& array, int rows, CUtensorMap* map);

}  // namespace kvblock::hopper
