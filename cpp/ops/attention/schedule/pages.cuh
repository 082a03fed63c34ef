// The blocks of a cache: where a key of a sequence lies (kvblock/paged_attention.h has the rules).
#pragma once

#include <cstdint>

#include "device/fast_div.cuh"
#include "ops/attention/schedule/ragged.cuh"

namespace kvblock {

// A kernel's parameters have room for it.
constexpr int kMostArrays = 128;

// Where the scales of a cache of 8 bits lie, in elements: one of all, one for each KV head, or,
// with `each`, one for each token and head of a block. NULL: 1.
struct ScaleStrides {
  const float* data;
  int64_t layer, block;
  int32_t token, head;
  bool each;
};

// In units: PagedParams says how large.
struct PageStrides {
  uint32_t block, token, head;
};

struct PagedParams : RaggedParams {
  const int32_t* block_tables;
  uint32_t num_blocks;
  PageStrides k_strides, v_strides;
  uint32_t unit;  // bytes, so many that no place of a layer is 2^32 units away from its first
  ScaleStrides k_scale, v_scale;
  const int32_t* layer;
  int32_t layer_batch, num_layers, num_arrays;
  int64_t layer_stride;  // in bytes
  const char *k_arrays[kMostArrays], *v_arrays[kMostArrays];
};

// The number of call `index`'s layer; num_layers or more, or less than 0: there is none.
__device__ __forceinline__ int LayerNumber(const PagedParams& p, int index) {
  return p.layer != nullptr ? __ldg(p.layer + index) : 0;
}

// Where a layer has its first key and value.
struct PagedLayer {
  const char *k, *v;
  int number;
  bool there;
};
__device__ __forceinline__ PagedLayer LayerAt(const PagedParams& p, int number) {
  const bool there = number >= 0 && number < p.num_layers;
  if (!there) number = 0;
  const int array = p.num_arrays > 1 ? number : 0;
  const int64_t offset = number * p.layer_stride;
  return {p.k_arrays[array] + offset, p.v_arrays[array] + offset, number, there};
}
__device__ __forceinline__ PagedLayer FindLayer(const PagedParams& p, int index) {
  return LayerAt(p, LayerNumber(p, index));
}

// A key's block, which may be none, and its slot there.
struct PagedKey {
  int block, slot;
};
// The ids of a member's blocks.
__device__ __forceinline__ const int32_t* FindTable(const PagedParams& p, int member) {
  return p.block_tables + (p.table_first != nullptr ? TableFirst(p, member)
                                                    : static_cast<int64_t>(member) * p.table_width);
}
// Of a key that the table has room for.
__device__ __forceinline__ PagedKey FindKey(const PagedParams& p, const int32_t* table, int key) {
  const int page = static_cast<int>(p.block_size(static_cast<uint32_t>(key)));
  return {__ldg(table + page), key - page * static_cast<int>(p.block_size.d)};
}
__device__ __forceinline__ PagedKey FindKey(const PagedParams& p, int member, int key) {
  return FindKey(p, FindTable(p, member), key);
}
__device__ __forceinline__ bool HasBlock(const PagedParams& p, const PagedKey& at) {
  return static_cast<uint32_t>(at.block) < p.num_blocks;
}
// In units, from where the key's layer and head begin.
__device__ __forceinline__ uint32_t PageRow(const PageStrides& strides, const PagedKey& at) {
  return strides.block * static_cast<uint32_t>(at.block) +
         strides.token * static_cast<uint32_t>(at.slot);
}

}  // namespace kvblock
