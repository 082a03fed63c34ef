// Launching Hopper's kernel for latent caches.
#pragma once

#include "ops/attention/contract/launch.h"
#include "ops/attention/hopper/clusters.h"
#include "ops/attention/hopper/latent/kernel.cuh"
#include "ops/attention/hopper/latent/launcher.h"

namespace kvblock::hopper {

template <typename Traits>
cudaError_t LaunchLatentAs(const PagedParams& p, const LatentMaps& maps, unsigned shares,
                           cudaStream_t stream) {
  const auto kernel = AttentionLatent<Traits>;
  constexpr int kSharedBytes = sizeof(LatentShared<Traits>), kBesides = 3072;
  static_assert(kSharedBytes + kBesides <= kMostSharedBytes);  // a line has variables of its own
  static PerDevice<bool> prepared;
  int device = 0;
  bool done = false;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = prepared.Get(device, &done, [&](bool* to) {
      *to = true;
      const cudaError_t status = AllowSharedBytes(kernel, kSharedBytes);
      // As generic/split/launch.cuh says: who combines begins beside it.
      return status != cudaSuccess
                 ? status
                 : cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared);
    });
  }
  if (status != cudaSuccess) return status;
  return LaunchClusters<Traits::kCluster>(kernel, int64_t{shares} * Traits::kCluster,
                                          Traits::kThreads, kSharedBytes, stream, p, maps);
}

template <typename T, int kDim, int kValueDim>
cudaError_t LaunchLatentSharesOf(const PagedParams& p, const LatentMaps& maps, unsigned shares,
                                 cudaStream_t stream) {
  return p.piece_ctas == 2
             ? LaunchLatentAs<LatentTraits<T, kDim, kValueDim, 2>>(p, maps, shares, stream)
             : LaunchLatentAs<LatentTraits<T, kDim, kValueDim, 1>>(p, maps, shares, stream);
}

}  // namespace kvblock::hopper
