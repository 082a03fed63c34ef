// Launching the generic backward kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <string>

#include "host/block_copy_check.h"
#include "ops/attention/generic/backward.h"
#include "ops/attention/generic/backward_bias.cuh"
#include "ops/attention/generic/backward_kv.cuh"
#include "ops/attention/generic/backward_q.cuh"

namespace kvblock {

// tiles * owners CTAs of `kernel`.
template <typename Shape>
const char* LaunchGrid(void (*kernel)(AttentionParams), const kvblock_attention& a, int64_t tiles,
                       int64_t owners, cudaStream_t stream) {
  if (tiles == 0 || owners == 0) return nullptr;
  if (tiles > INT32_MAX / owners) {
    return Message("attention: " + std::to_string(tiles) + " tiles for each of " +
                   std::to_string(owners) +
                   " heads are more than one launch can have; split the batch");
  }
  AttentionParams p = MakeAttentionParams(a);
  p.tiles = static_cast<int32_t>(tiles);
  cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes);
  if (status == cudaSuccess) {
    kernel<<<static_cast<unsigned>(tiles * owners), Shape::kThreads, Shape::kBytes, stream>>>(p);
    status = cudaGetLastError();
  }
  if (status == cudaSuccess) return nullptr;
  if (status == cudaErrorInvalidValue) {
    cudaGetLastError();
    return Message("attention: the backward kernels need " + std::to_string(Shape::kBytes / 1024) +
                   " KiB of shared memory, which this GPU has not; use implementation='xla'");
  }
  return Message(std::string("attention: ") + cudaGetErrorString(status));
}

inline int64_t Members(const kvblock_attention& a) { return a.cu_q != nullptr ? 1 : a.batch; }

template <int kDim>
const char* LaunchBackwardKv(const kvblock_attention& a, cudaStream_t stream) {
  using Shape = BackwardKvShape<kDim>;
  return LaunchGrid<Shape>(a.dtype == KVBLOCK_BF16 ? AttentionBackwardKv<__nv_bfloat16, kDim>
                                                   : AttentionBackwardKv<__half, kDim>,
                           a, a.kv_len == 0 ? 0 : NumTiles(a, a.kv_len, Shape::kKeys),
                           Members(a) * a.num_kv_heads, stream);
}

template <int kDim>
const char* LaunchBackwardQ(const kvblock_attention& a, cudaStream_t stream) {
  using Shape = BackwardQShape<kDim>;
  return LaunchGrid<Shape>(a.dtype == KVBLOCK_BF16 ? AttentionBackwardQ<__nv_bfloat16, kDim>
                                                   : AttentionBackwardQ<__half, kDim>,
                           a, a.q_len == 0 ? 0 : NumTiles(a, a.q_len, Shape::kQueries),
                           Members(a) * a.num_heads, stream);
}

template <int kDim>
const char* LaunchBackwardBias(const kvblock_attention& a, cudaStream_t stream) {
  using Shape = BackwardBiasShape<kDim>;
  constexpr int64_t kTile = Shape::kTile;
  const int64_t tiles = (a.q_len + kTile - 1) / kTile * ((a.kv_len + kTile - 1) / kTile);
  return LaunchGrid<Shape>(a.dtype == KVBLOCK_BF16 ? AttentionBackwardBias<__nv_bfloat16, kDim>
                                                   : AttentionBackwardBias<__half, kDim>,
                           a, tiles, int64_t{a.bias_batch} * a.bias_heads, stream);
}

}  // namespace kvblock
