// Launching the Hopper backward kernels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/tensor_map.h"
#include "ops/attention/common/launch.h"
#include "ops/attention/hopper/backward.h"
#include "ops/attention/hopper/backward_kv.cuh"

namespace kvblock::hopper {

template <typename T, typename Shape, bool kPlain>
const char* LaunchBackwardKvAs(const kvblock_attention& a, cudaStream_t stream) {
  AttentionParams p = MakeAttentionParams(a);
  const int64_t members = Members(a);
  const int64_t tiles = a.kv_len == 0 ? 0 : NumTiles(a, a.kv_len, Shape::kClusterKeys);
  const int64_t owners = members * a.num_kv_heads;
  if (Shape::kWide && a.dq_state != nullptr) {  // its workers add, and do not look at who is first
    return Message("attention: these tiles need a dq_accum that was cleared");
  }
  if (tiles == 0 || owners == 0) return nullptr;
  if (const char* error = PlanGrid(&p, tiles, owners)) return error;
  // Heads that take turns should fit in L2 with their Q, dO and dq_accum, but fill the GPU, or the
  // last one's longest tiles would end alone. Without masks no tile is longer than another, and one
  // head after the other reads and adds least in device memory.
  constexpr int64_t kAtOnce = 128;  // CTAs, about
  const int64_t bytes = a.q_len * p.group * (int64_t{6} * a.head_dim + int64_t{2} * a.value_dim);
  const int64_t filling = std::min((kAtOnce - 1) / (tiles * Shape::kCluster) + 1, owners);
  const bool masked = a.window_left >= 0 || a.window_right >= 0 || a.cu_q != nullptr ||
                      a.q_segments != nullptr || a.tile_indices != nullptr;
  p.heads_apart = masked || a.dq_turns != nullptr
                      ? std::max(OwnersApart(p, bytes), static_cast<int32_t>(filling))
                      : 1;

  BackwardMaps maps;
  // Arrays without rows are never read and may have no address, but a map needs both.
  const auto map = [&](const void* data, int64_t rows, int heads, int dim, int box,
                       CUtensorMap* to) {
    return MakeTensorMap(
        {rows > 0 ? data : a.k, a.dtype, members, std::max<int64_t>(rows, 1), heads, dim}, box, to);
  };
  const char* error = map(a.q, a.q_len, a.num_heads, a.head_dim, Shape::kQueries, &maps.q);
  if (!error) error = map(a.d_o, a.q_len, a.num_heads, a.value_dim, Shape::kQueries, &maps.d_o);
  if (!error) error = map(a.k, a.kv_len, a.num_kv_heads, a.head_dim, Shape::kKeys, &maps.k);
  if (!error) error = map(a.v, a.kv_len, a.num_kv_heads, a.value_dim, Shape::kKeys, &maps.v);
  if (!error) error = map(a.dk, a.kv_len, a.num_kv_heads, a.head_dim, kStoredRows, &maps.dk);
  if (!error) error = map(a.dv, a.kv_len, a.num_kv_heads, a.value_dim, kStoredRows, &maps.dv);
  if (error) return error;

  const auto kernel = AttentionBackwardKv<T, Shape, kPlain>;
  cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes);
  if (status != cudaSuccess) return Failure(status);
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Shape::kCluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(tiles * owners * Shape::kCluster);
  config.blockDim = Shape::kThreads;
  config.dynamicSmemBytes = Shape::kBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = Shape::kCluster > 1 ? 1 : 0;
  status = cudaLaunchKernelEx(&config, kernel, p, maps);
  return status == cudaSuccess ? nullptr : Failure(status);
}

template <typename T, int kDim, int kValueDim>
const char* LaunchBackwardKvOf(const kvblock_attention& a, cudaStream_t stream) {
  using Shape = BackwardShape<kDim, kValueDim>;
  using Capped = BackwardShape<kDim, kValueDim, false, true>;
  const bool plain = IsPlain(a), capped = !plain && a.bias == nullptr;
  if constexpr (kDim == 128 && kValueDim == 128) {
    if (LaunchIsTall(a)) {
      return LaunchBackwardKvAs<T, BackwardShape<128, 128, true>, true>(a, stream);
    }
  }
  return plain    ? LaunchBackwardKvAs<T, Shape, true>(a, stream)
         : capped ? LaunchBackwardKvAs<T, Capped, false>(a, stream)
                  : LaunchBackwardKvAs<T, Shape, false>(a, stream);
}

}  // namespace kvblock::hopper
