// What every attention launcher needs on the host.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <mutex>
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

// Whether a kernel may call AwaitPriorLaunch (device/dependent.cuh) and mean it: a GPU may run code
// that was compiled for an older one.
template <typename Kernel>
cudaError_t BeginsEarly(Kernel kernel, bool* early) {
  cudaFuncAttributes compiled{};
  const cudaError_t status = cudaFuncGetAttributes(&compiled, kernel);
  *early = std::min(compiled.ptxVersion, compiled.binaryVersion) >= 90;
  return status;
}

// The same as LaunchGrid for a kernel that looks at what the launch in front of it wrote only when
// it is there, and of which some CTA calls AwaitPriorLaunch whatever there is to do: else it may
// end first, and what comes next finds that launch unfinished.
template <typename... Parameters, typename... Args>
cudaError_t LaunchDependentGrid(void (*kernel)(Parameters...), bool early, dim3 ctas, int threads,
                                int shared_bytes, cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute programmatic{};
  programmatic.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  programmatic.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = LaunchConfig(ctas, threads, shared_bytes, stream);
  config.attrs = &programmatic;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// What is the same at every launch on a device, and is asked once.
template <typename T>
class PerDevice {
 public:
  // ask(&value) tells a value, and returns a cudaError_t.
  template <typename Ask>
  cudaError_t Get(int device, T* value, Ask ask) {
    if (device < 0 || device >= kMostDevices) return ask(value);
    if (!known_[device].load(std::memory_order_acquire)) {
      const std::lock_guard<std::mutex> lock(mutex_);
      // Another thread may have asked while this one waited, and others read what it was told.
      if (!known_[device].load(std::memory_order_relaxed)) {
        const cudaError_t status = ask(&values_[device]);
        if (status != cudaSuccess) return status;
        known_[device].store(true, std::memory_order_release);
      }
    }
    *value = values_[device];
    return cudaSuccess;
  }

 private:
  static constexpr int kMostDevices = 64;
  std::mutex mutex_;
  std::atomic<bool> known_[kMostDevices] = {};
  T values_[kMostDevices];
};

struct Gpu {
  int device, multiprocessors;
  int cta_shared, multiprocessor_shared;  // bytes that one can have
};

// The current one; NULL, or what is wrong.
inline const char* AskGpu(Gpu* gpu) {
  static PerDevice<Gpu> known;
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return CudaResult(status);
  return CudaResult(known.Get(device, gpu, [&](Gpu* to) {
    to->device = device;
    const auto ask = [&](int* value, cudaDeviceAttr attribute) {
      if (status == cudaSuccess) status = cudaDeviceGetAttribute(value, attribute, device);
    };
    ask(&to->multiprocessors, cudaDevAttrMultiProcessorCount);
    ask(&to->cta_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    ask(&to->multiprocessor_shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    return status;
  }));
}

}  // namespace kvblock
