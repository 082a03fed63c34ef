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
