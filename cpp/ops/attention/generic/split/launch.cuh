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

// The kernel that puts together what another one leaves.
template <typename Traits>
constexpr auto CombineOf() {
  return AttentionCombine<typename Traits::T, Traits::kTileKeys, typename Traits::Keys::Members>;
}

// The kernel that computes shares.
template <typename Traits>
struct SplitShares {
  static constexpr int kPieceCtas = 1;  // that compute a share
  static cudaError_t Prepare() {
    cudaError_t status = cudaFuncSetAttribute(
        AttentionSplit<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSharedBytes);
    if (status == cudaSuccess) status = PreferShared(AttentionSplit<Traits>);
    return status;
  }
  const char* Launch(const typename Traits::Params& p, unsigned ctas, cudaStream_t stream) const {
    return CudaResult(LaunchGrid(AttentionSplit<Traits>, dim3(ctas), Traits::kThreads,
                                 Traits::kSharedBytes, stream, p));
  }
};

// What is the same for all launches of a kernel; whether combine's may begin before its CTAs end.
template <typename Traits, typename Shares>
cudaError_t Prepare(bool* early) {
  cudaError_t status = Shares::Prepare();
  if constexpr (Traits::kCombines) {
    if (status == cudaSuccess) status = PreferShared(CombineOf<Traits>());
    if (status == cudaSuccess) status = BeginsEarly(CombineOf<Traits>(), early);
  }
  return status;
}

// The CTAs of all lines, and those that put pieces together if there may be any.
template <typename Traits, typename Shares = SplitShares<Traits>>
const char* LaunchPieces(const typename Traits::Params& p, const SplitWork& work, const Cut& cut,
                         const Gpu& gpu, cudaStream_t stream, const Shares& shares = {}) {
  static PerDevice<bool> prepared;
  bool early = false;
  cudaError_t status = prepared.Get(gpu.device, &early, Prepare<Traits, Shares>);
  if (status != cudaSuccess) return CudaResult(status);
  const auto ctas = static_cast<unsigned>(cut.lines * cut.ctas);
  if (const char* error = shares.Launch(p, ctas, stream)) return error;
  if constexpr (Traits::kCombines) {
    if (!cut.combines) return nullptr;
    const int64_t threads = work.filled * (p.value_dim / 4) * p.joining;
    const int64_t of_line = p.combine_units ? cut.units : cut.ctas - 1;
    const dim3 grid(static_cast<unsigned>(cut.lines * of_line),
                    static_cast<unsigned>((threads + kCombineThreads - 1) / kCombineThreads));
    const typename Traits::Keys::Members& members = p;
    status =
        LaunchDependentGrid(CombineOf<Traits>(), early, grid, kCombineThreads, 0, stream, members);
  }
  return CudaResult(status);
}

// CTAs that the GPU has places for at a time.
template <typename Traits>
int64_t PlacesFor(const Gpu& gpu) {
  constexpr int kBesides = 4096;  // bytes of a CTA: its own variables, and what the driver keeps
  const int fit = gpu.multiprocessor_shared / (Traits::kSharedBytes + kBesides);
  return std::min(int64_t{gpu.multiprocessors} * std::clamp(fit, 1, Traits::kSplit.ctas),
                  int64_t{kMostCtas});
}

// NULL, or that a launch cannot count so many tiles.
inline const char* CheckTiles(const SplitWork& work, int64_t tiles_of_unit) {
  if (work.units <= INT32_MAX / tiles_of_unit) return nullptr;
  return Message("attention: " + std::to_string(tiles_of_unit) + " KV tiles for each of " +
                 std::to_string(work.units) +
                 " heads are more than one launch can have; split the batch");
}

template <typename T, int kDim, int kTileBlocks>
const char* LaunchSplitAs(const AttentionCall& a, cudaStream_t stream) {
  using Narrow = SplitTraits<T, kDim, kTileBlocks, DenseKeys>;
  Gpu gpu{};
  if (const char* error = AskGpu(&gpu)) return error;
  // Of consumer GPUs a CTA can have 99 KiB, too little for head dims beyond 192.
  if (Narrow::kSharedBytes > gpu.cta_shared) return LaunchForwardOf<T, kDim>(a, stream);
  if (a.q_len * (a.num_heads / a.num_kv_heads) > INT32_MAX) {
    return "attention: q_len * num_heads / num_kv_heads must be an int32";
  }
  const SplitWork work = WorkOf(a);
  const int64_t tiles = TilesOfUnit(a.kv_len, Narrow::kTileKeys);
  if (const char* error = CheckTiles(work, tiles)) return error;
  // A CTA for every place on the GPU, if there is a tile for each.
  const Cut cut = CutFor(work, a.num_kv_heads, tiles, PlacesFor<Narrow>(gpu));
  if constexpr (HasWide(kDim)) {
    using Wide = SplitTraits<T, kDim, kTileBlocks, DenseKeys, true>;
    const int64_t wide_tiles = TilesOfUnit(a.kv_len, Wide::kTileKeys);
    const Cut wide = CutFor(work, a.num_kv_heads, wide_tiles, gpu.multiprocessors);
    if (cut.combines && !wide.combines && Wide::kSharedBytes <= gpu.cta_shared) {
      return LaunchPieces<Wide>(MakeShareParams(a, work, wide), work, wide, gpu, stream);
    }
  }
  return LaunchPieces<Narrow>(MakeShareParams(a, work, cut), work, cut, gpu, stream);
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
