// Launching the generic backward kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "host/message.h"
#include "ops/attention/contract/launch.h"
#include "ops/attention/generic/backward/bias.cuh"
#include "ops/attention/generic/backward/kv.cuh"
#include "ops/attention/generic/backward/launcher.h"
#include "ops/attention/generic/backward/q.cuh"
#include "ops/attention/schedule/grid.h"

namespace kvblock::generic {

// Launches kernel(args...) on p's grid with `bytes` of the `available` shared memory.
template <int kThreads, typename Kernel, typename... Args>
const char* Launch(Kernel kernel, int bytes, int available, const AttentionParams& p,
                   cudaStream_t stream, const Args&... args) {
  if (p.tiles == 0 || p.num_pairs == 0) return nullptr;
  if (bytes > available) {
    return Message("attention backward: head dims up to " +
                   std::to_string(std::max(p.head_dim, p.value_dim)) + " need " +
                   std::to_string(bytes) + " bytes of shared memory, and this GPU has " +
                   std::to_string(available) + "; use implementation='xla'");
  }
  cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return CudaResult(status);
  const dim3 ctas(static_cast<unsigned>(int64_t{p.tiles} * p.num_pairs));
  return CudaResult(LaunchGrid(kernel, ctas, kThreads, bytes, stream, args...));
}

template <typename T, int kDim>
const char* LaunchBackwardKvOf(const AttentionCall& a, cudaStream_t stream) {
  using Shape = BackwardKvShape<T, kDim>;
  DroppingParams p = MakeDroppingParams(a);
  const int64_t tiles = a.kv_len == 0 ? 0 : NumTiles(a, a.kv_len, Shape::kKeys);
  if (const char* error = PlanGrid(&p, tiles, Members(a) * a.num_kv_heads)) return error;
  // Heads that take turns should fit in L2 with their Q, dO and dq_accum.
  constexpr int64_t kElement = sizeof(T);
  const int64_t bytes = a.q_len * ((kElement + 4) * a.head_dim + kElement * a.value_dim);
  p.section_pairs = SectionOwners(p, bytes);

  Gpu gpu{};
  if (const char* error = AskGpu(&gpu)) return error;
  const BackwardKvPlan plan = Shape::Plan(gpu.cta_shared);
  return Launch<Shape::kThreads>(AttentionBackwardKv<T, kDim>, plan.bytes, gpu.cta_shared, p,
                                 stream, p, plan);
}

template <typename T, int kDim>
const char* LaunchBackwardQOf(const AttentionCall& a, cudaStream_t stream) {
  using Shape = BackwardQShape<T, kDim>;
  DroppingParams p = MakeDroppingParams(a);
  const int64_t tiles = a.q_len == 0 ? 0 : NumTiles(a, a.q_len, Shape::kQueries);
  if (const char* error = PlanGrid(&p, tiles, Members(a) * a.num_heads)) return error;
  Gpu gpu{};
  if (const char* error = AskGpu(&gpu)) return error;
  return Launch<Shape::kThreads>(AttentionBackwardQ<T, kDim>, Shape::kBytes, gpu.cta_shared, p,
                                 stream, p);
}

template <typename T, int kDim>
const char* LaunchBackwardBiasOf(const AttentionCall& a, cudaStream_t stream) {
  using Shape = BackwardBiasShape<T, kDim>;
  constexpr int64_t kTile = Shape::kTile;
  DroppingParams p = MakeDroppingParams(a);
  const int64_t tiles = (a.q_len + kTile - 1) / kTile * ((a.kv_len + kTile - 1) / kTile);
  if (const char* error = PlanGrid(&p, tiles, int64_t{a.bias_batch} * a.bias_heads)) return error;
  Gpu gpu{};
  if (const char* error = AskGpu(&gpu)) return error;
  return Launch<Shape::kThreads>(AttentionBackwardBias<T, kDim>, Shape::kBytes, gpu.cta_shared, p,
                                 stream, p);
}

}  // namespace kvblock::generic
