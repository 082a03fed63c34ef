// Launching Hopper's kernels: on clusters, with more shared memory than a kernel has by default.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/attention/contract/launch.h"

namespace kvblock::hopper {

constexpr int kMostSharedBytes = 227 * 1024;

// Lets a kernel have `bytes` of shared memory, on the current device.
template <typename Kernel>
cudaError_t AllowSharedBytes(Kernel kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// Launches kernel(args...) on so many CTAs, in clusters of kCluster.
template <int kCluster, typename Kernel, typename... Args>
cudaError_t LaunchClusters(Kernel kernel, int64_t ctas, int threads, int shared_bytes,
                           cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config =
      LaunchConfig(dim3(static_cast<unsigned>(ctas)), threads, shared_bytes, stream);
  config.attrs = &cluster;
  config.numAttrs = kCluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace kvblock::hopper
