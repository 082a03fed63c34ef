// Whether Hopper's kernels run on the current GPU.
#pragma once

#include <cuda_runtime.h>

#include "ops/attention/contract/launch.h"

namespace kvblock::hopper {

inline bool OnHopper() {
  static PerDevice<bool> known;
  int device = 0;
  bool hopper = false;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  const cudaError_t status = known.Get(device, &hopper, [&](bool* to) {
    int major = 0, minor = 0;
    cudaError_t status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (status == cudaSuccess) {
      status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    }
    *to = major == 9 && minor == 0;
    return status;
  });
  return status == cudaSuccess && hopper;
}

}  // namespace kvblock::hopper
