// What every attention launcher needs on the host.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "host/message.h"

namespace kvblock {

// NULL on success, else a message: what CUDA says, and what was being done if that is not a launch.
inline const char* CudaResult(cudaError_t status, const char* doing = nullptr) {
  if (status == cudaSuccess) return nullptr;
  return Message(std::string("attention: ") + (doing != nullptr ? doing + std::string(": ") : "") +
                 cudaGetErrorString(status));
}

inline cudaLaunchConfig_t LaunchConfig(dim3 ctas, int threads, int shared_bytes,
                                       cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = ctas;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  return config;
}

// kernel(args...) on so many CTAs.
template <typename... Parameters, typename... Args>
cudaError_t LaunchGrid(void (*kernel)(Parameters...), dim3 ctas, int threads, int shared_bytes,
                       cudaStream_t stream, const Args&... args) {
  const cudaLaunchConfig_t config = LaunchConfig(ctas, threads, shared_bytes, stream);
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// The same for a kernel that calls AwaitPriorLaunch (device/dependent.cuh) before it looks at what
// the launch in front of it wrote, and of which some CTA calls it whatever there is to do: else it
// may end first, and what comes next finds that launch unfinished. It may begin early where it was
// compiled to wait: a GPU may run code that was compiled for an older one.
template <typename... Parameters, typename... Args>
cudaError_t LaunchDependentGrid(void (*kernel)(Parameters...), dim3 ctas, int threads,
                                cudaStream_t stream, const Args&... args) {
  cudaFuncAttributes compiled{};
  const cudaError_t status = cudaFuncGetAttributes(&compiled, kernel);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = LaunchConfig(ctas, threads, 0, stream);
  if (std::min(compiled.ptxVersion, compiled.binaryVersion) >= 90) {
    config.attrs = &early;
    config.numAttrs = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, args...);
}

constexpr int kMaxDevices = 64;

// How many multiprocessors a device has; asked once.
inline int Multiprocessors(int device) {
  static std::atomic<int> known[kMaxDevices];
  int count = device < kMaxDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (device < kMaxDevices) known[device].store(count, std::memory_order_relaxed);
  }
  return std::max(count, 1);
}

}  // namespace kvblock
