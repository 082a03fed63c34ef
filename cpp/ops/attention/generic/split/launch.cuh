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

// Two kernels run on a multiprocessor at the same time only if it has given as much of its memory
// to shared memory as either asks for. What CTAs of the one leave must be enough for the other, so
// both ask for all there is.
template <typename Kernel>
cudaError_t PreferShared(Kernel kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

// What is the same for all launches of a kernel; whether combine's may begin before its CTAs end.
template <typename Traits>
cudaError_t Prepare(bool* early) {
  cudaError_t status = cudaFuncSetAttribute(
      AttentionSplit<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSharedBytes);
  if (status == cudaSuccess) status = PreferShared(AttentionSplit<Traits>);
  if constexpr (!Traits::kWide) {
    const auto combine = AttentionCombine<typename Traits::T, Traits::kTileKeys>;
    if (status == cudaSuccess) status = PreferShared(combine);
    if (status == cudaSuccess) status = BeginsEarly(combine, early);
  }
  return status;
}

// So many CTAs, and those that put pieces together if there may be any.
template <typename Traits>
cudaError_t LaunchPieces(const AttentionCall& a, const SplitWork& work, const Gpu& gpu,
                         int32_t ctas, cudaStream_t stream) {
  static PerDevice<bool> prepared;
  bool early = false;
  cudaError_t status = prepared.Get(gpu.device, &early, Prepare<Traits>);
  if (status != cudaSuccess) return status;
  const ShareParams p = MakeShareParams(a, work, ctas);
  status = LaunchGrid(AttentionSplit<Traits>, dim3(static_cast<unsigned>(ctas)), Traits::kThreads,
                      Traits::kSharedBytes, stream, p);
  if constexpr (!Traits::kWide) {
    if (status != cudaSuccess || NoneIsCut(work, ctas)) return status;
    const int64_t rows = std::min<int64_t>(p.rows, a.q_len * p.group);
    const int64_t threads = rows * (a.value_dim / 4) * p.joining;
    const dim3 grid(static_cast<unsigned>(p.combine_units ? work.units : ctas - 1),
                    static_cast<unsigned>((threads + kCombineThreads - 1) / kCombineThreads));
    status = LaunchDependentGrid(AttentionCombine<typename Traits::T, Traits::kTileKeys>, early,
                                 grid, kCombineThreads, stream, p);
  }
  return status;
}

template <typename T, int kDim, int kTileBlocks>
const char* LaunchSplitAs(const AttentionCall& a, cudaStream_t stream) {
  using Narrow = SplitTraits<T, kDim, kTileBlocks>;
  constexpr int kBesides = 2048;  // bytes of a CTA: its own variables, and what the driver keeps
  Gpu gpu{};
  if (const char* error = AskGpu(&gpu)) return error;
  // Of consumer GPUs a CTA can have 99 KiB, too little for head dims beyond 192.
  if (Narrow::kSharedBytes > gpu.cta_shared) return LaunchForwardOf<T, kDim>(a, stream);
  if (a.q_len * (a.num_heads / a.num_kv_heads) > INT32_MAX) {
    return "attention: q_len * num_heads / num_kv_heads must be an int32";
  }
  const SplitWork work = WorkOf(a);
  const auto tiles_of_unit = [&](int64_t keys) {
    return std::max<int64_t>((a.kv_len + keys - 1) / keys, 1);
  };
  const int64_t tiles = tiles_of_unit(Narrow::kTileKeys);
  if (work.units > INT32_MAX / tiles) {
    return Message("attention: " + std::to_string(tiles) + " KV tiles for each of " +
                   std::to_string(work.units) +
                   " heads are more than one launch can have; split the batch");
  }
  // A CTA for every place on the GPU, if there is a tile for each.
  const int fit = gpu.multiprocessor_shared / (Narrow::kSharedBytes + kBesides);
  const int64_t places = std::min(
      int64_t{gpu.multiprocessors} * std::clamp(fit, 1, Narrow::kSplit.ctas), int64_t{kMostCtas});
  const int32_t ctas = CtasFor(work, tiles, places);
  if constexpr (HasWide(kDim)) {
    using Wide = SplitTraits<T, kDim, kTileBlocks, true>;
    const int32_t wide = CtasFor(work, tiles_of_unit(Wide::kTileKeys), gpu.multiprocessors);
    if (!NoneIsCut(work, ctas) && NoneIsCut(work, wide) && Wide::kSharedBytes <= gpu.cta_shared) {
      return CudaResult(LaunchPieces<Wide>(a, work, gpu, wide, stream));
    }
  }
  return CudaResult(LaunchPieces<Narrow>(a, work, gpu, ctas, stream));
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
