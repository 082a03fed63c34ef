// Launching the attention forward kernels for few queries.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "ops/attention/combine/combine.cuh"
#include "ops/attention/contract/launch.h"
#include "ops/attention/generic/forward/launcher.h"
#include "ops/attention/generic/split/kernel.cuh"
#include "ops/attention/generic/split/launcher.h"
#include "ops/attention/generic/split/plan.h"

namespace kvblock::generic {

template <typename T, int kDim, int kTileBlocks>
const char* LaunchSplitAs(const AttentionCall& a, cudaStream_t stream) {
  using Traits = SplitTraits<T, kDim, kTileBlocks>;
  using Combined = Combine<T, Traits::kTileKeys>;
  constexpr int kBesides = 2048;  // bytes of a CTA: its own variables, and what the driver keeps
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  int available = 0, of_multiprocessor = 0;
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&available, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&of_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                                    device);
  }
  if (status != cudaSuccess) return CudaResult(status);
  // Of consumer GPUs a CTA can have 99 KiB, too little for head dims beyond 192.
  if (Traits::kSharedBytes > available) return LaunchForwardOf<T, kDim>(a, stream);

  if (a.q_len * (a.num_heads / a.num_kv_heads) > INT32_MAX) {
    return "attention: q_len * num_heads / num_kv_heads must be an int32";
  }

  // A CTA for every place on the GPU, if there is a tile for each.
  ShareParams p = MakeShareParams(a, 1);
  const int64_t units = int64_t{a.batch} * p.row_tiles * a.num_kv_heads;
  const int64_t tiles_of_unit =
      std::max<int64_t>((a.kv_len + Traits::kTileKeys - 1) / Traits::kTileKeys, 1);
  if (units > INT32_MAX / tiles_of_unit) {
    return Message("attention: " + std::to_string(tiles_of_unit) + " KV tiles for each of " +
                   std::to_string(units) +
                   " heads are more than one launch can have; split the batch");
  }
  const int fit = of_multiprocessor / (Traits::kSharedBytes + kBesides);
  const int64_t places =
      std::min(int64_t{Multiprocessors(device)} * std::clamp(fit, 1, Traits::kSplit.ctas),
               int64_t{kMostCtas});
  p = MakeShareParams(a, static_cast<int32_t>(std::min(units * tiles_of_unit, places)));

  status = cudaFuncSetAttribute(AttentionSplit<T, kDim, kTileBlocks>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSharedBytes);
  if (status != cudaSuccess) return CudaResult(status);
  status = LaunchGrid(AttentionSplit<T, kDim, kTileBlocks>, dim3(static_cast<unsigned>(p.ctas)),
                      Traits::kThreads, Traits::kSharedBytes, stream, p);
  if (status == cudaSuccess && p.ctas > 1) {
    const int64_t rows = std::min<int64_t>(p.rows, a.q_len * p.group);
    const int at_once = Combined::kWarps / p.joining;
    status = LaunchDependentGrid(AttentionCombine<T, Traits::kTileKeys>,
                                 dim3(static_cast<unsigned>(p.ctas - 1),
                                      static_cast<unsigned>((rows + at_once - 1) / at_once)),
                                 Combined::kThreads, stream, p);
  }
  return CudaResult(status);
}

template <typename T, int kDim>
const char* LaunchSplitOf(const AttentionCall& a, cudaStream_t stream) {
  switch (TileRows(a.q_len * (a.num_heads / a.num_kv_heads))) {
    case 16: return LaunchSplitAs<T, kDim, 1>(a, stream);
    case 32: return LaunchSplitAs<T, kDim, 2>(a, stream);
    default: return LaunchSplitAs<T, kDim, 4>(a, stream);
  }
}

}  // namespace kvblock::generic
