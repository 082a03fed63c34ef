// Launching the generic forward kernel: the grid and its order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "host/block_copy_check.h"
#include "ops/attention/generic/forward.cuh"
#include "ops/attention/generic/forward.h"

namespace kvblock {

// Heads whose query tiles take turns in the grid. More of them balance the end of a causal launch;
// their K and V should fit in L2 together (about 32 MiB of an H100's 50).
inline int32_t HeadsApart(const AttentionParams& p) {
  const int64_t bytes = int64_t{2} * p.kv_len * (p.head_dim + p.value_dim);
  const int64_t kv_heads = (int64_t{32} << 20) / std::max<int64_t>(bytes, 1);
  return static_cast<int32_t>(std::clamp<int64_t>(kv_heads * p.group, 1, p.num_pairs));
}

template <typename T, int kDim>
const char* LaunchForwardAs(const kvblock_attention& a, cudaStream_t stream) {
  using Traits = ForwardTraits<T, kDim>;
  AttentionParams p = MakeAttentionParams(a);
  const int64_t tiles = NumTiles(a, a.q_len, Traits::kQueries);
  const int64_t ctas = tiles * p.num_pairs;
  if (ctas > INT32_MAX) {
    return Message("attention: " + std::to_string(ctas) +
                   " query tiles are more than one launch can have; split the batch");
  }
  p.tiles = static_cast<int32_t>(tiles);
  p.heads_apart = HeadsApart(p);
  cudaError_t status = cudaFuncSetAttribute(
      AttentionForward<T, kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSharedBytes);
  if (status == cudaSuccess) {
    AttentionForward<T, kDim>
        <<<static_cast<unsigned>(ctas), Traits::kThreads, Traits::kSharedBytes, stream>>>(p);
    status = cudaGetLastError();
  }
  if (status == cudaSuccess) return nullptr;
  return Message(std::string("attention: ") + cudaGetErrorString(status));
}

template <int kDim>
const char* LaunchForward(const kvblock_attention& a, cudaStream_t stream) {
  return a.dtype == KVBLOCK_BF16 ? LaunchForwardAs<__nv_bfloat16, kDim>(a, stream)
                                 : LaunchForwardAs<__half, kDim>(a, stream);
}

}  // namespace kvblock
