// From a simplified copy to the kernels' parameters (host side, shared by the launchers).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "host/block_copy_check.h"
#include "host/message.h"
#include "kvblock/block_copy.h"
#include "ops/block_copy/block_copy_kernel.cuh"

namespace kvblock {

constexpr int64_t kMaxCount = (int64_t{1} << 31) - 1;  // FastDiv's range
// Base addresses that fit in the kernel's parameters (4 KiB, or 32 KiB from CUDA 12.1).
constexpr int kOneTable = 2, kSmallTable = 224, kLargeTable = 3900;

inline const char* CudaError(const char* what, cudaError_t status) {
  return status == cudaSuccess ? nullptr
                               : Message(std::string(what) + ": " + cudaGetErrorString(status));
}

// The part of side.buffers that the copy can reach.
inline int64_t ReachableBuffers(const kvblock_copy& copy, const kvblock_side& side) {
  int64_t last = 0;
  for (int64_t k = 0; k < copy.rank; ++k) last += (copy.dims[k] - 1) * side.table_strides[k];
  if (side.start != nullptr && side.start_limit > 0) {
    last += (side.start_limit - 1) * side.start_table_stride;
  }
  return last + 1;
}

template <int kRank>
SideParams<kRank> MakeSide(const kvblock_copy& copy, const kvblock_side& side, int table_begin) {
  SideParams<kRank> p{};
  const int pad = kRank - static_cast<int>(copy.rank);
  for (int k = 0; k < copy.rank; ++k) {  // dim 0 stays first, dims of extent 1 follow it
    const int to = k == 0 ? 0 : k + pad;
    p.strides[to] = side.strides[k];
    p.table_strides[to] = static_cast<int32_t>(side.table_strides[k]);
  }
  p.table_begin = table_begin;
  p.offset = side.offset;
  p.ids = side.ids;
  p.id_outer_stride = side.id_outer_stride;
  p.id_inner_stride = side.id_inner_stride;
  p.id_inner = FastDiv(static_cast<uint32_t>(side.ids ? side.id_inner : 1));
  p.id_limit = static_cast<int32_t>(std::min(side.id_limit, kMaxCount));
  p.start = side.start;
  p.start_stride = side.start_stride;
  p.start_table_stride = static_cast<int32_t>(side.start_table_stride);
  p.start_limit = static_cast<int32_t>(std::min(side.start_limit, kMaxCount));
  return p;
}

template <int kRank, int kTable>
Params<kRank, kTable> MakeParams(const kvblock_copy& copy) {
  Params<kRank, kTable> p{};
  p.count = static_cast<uint32_t>(NumCoordinates(copy));
  for (FastDiv& dim : p.dims) dim = FastDiv(1);
  for (int k = 0; k < copy.rank; ++k) {
    p.dims[k == 0 ? 0 : k + kRank - copy.rank] = FastDiv(static_cast<uint32_t>(copy.dims[k]));
  }
  const int64_t num_src = ReachableBuffers(copy, copy.src);
  const int64_t num_dst = ReachableBuffers(copy, copy.dst);
  for (int64_t i = 0; i < num_src; ++i) p.table[i] = static_cast<char*>(copy.src.buffers[i]);
  for (int64_t i = 0; i < num_dst; ++i) {
    p.table[num_src + i] = static_cast<char*>(copy.dst.buffers[i]);
  }
  p.src = MakeSide<kRank>(copy, copy.src, 0);
  p.dst = MakeSide<kRank>(copy, copy.dst, static_cast<int>(num_src));
  return p;
}

}  // namespace kvblock
