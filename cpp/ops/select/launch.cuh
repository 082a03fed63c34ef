// One launch of a kernel that chooses tiles, with what went wrong in words.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "host/message.h"

namespace kvblock {

// shared_bytes: that the launch asks for, beside what the kernel has by itself.
template <typename Params>
const char* Launch(const char* where, void (*kernel)(Params), const Params& params, dim3 grid,
                   int threads, void* stream, int shared_bytes = 0) {
  cudaError_t status = cudaSuccess;
  if (shared_bytes > 0) {
    status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  }
  if (status == cudaSuccess) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = static_cast<cudaStream_t>(stream);
    status = cudaLaunchKernelEx(&config, kernel, params);
  }
  if (status == cudaSuccess) return nullptr;
  return Message(std::string(where) + ": " + cudaGetErrorString(status));
}

}  // namespace kvblock
