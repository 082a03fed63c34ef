// Tensor maps: how the copy engine sees q, k, v and their like.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ops/attention/contract/head_array.h"

namespace kvblock::hopper {

// A map whose box is 128 bytes, 64 columns or 128 of 8 bits (fewer where dim is less: the rest
// comes as zeros) of `rows` rows of `heads` heads of one batch member (a row's heads side by side),
// at coordinates (column, head, row, batch), written to shared memory with the 128-byte swizzle.
// NULL, or what is wrong.
const char* MakeTensorMap(const HeadArray& array, int rows, CUtensorMap* map, int heads = 1);

// Blocks of a cache: an array of [layers, blocks, rows, heads, dim], in any order.
struct BlockArray {
  const void* data;
  int32_t dtype;
  int64_t sizes[5];    // dim, heads, rows of a block, blocks, layers
  int64_t strides[4];  // of heads, rows, blocks, layers, in bytes
};

// A map whose box is 128 bytes of `rows` rows of one head in a block, at coordinates (column,
// head, row, block, layer), written as above. False: the driver cannot.
bool MakeTensorMap(const BlockArray& array, int rows, CUtensorMap* map);

}  // namespace kvblock::hopper
