// The CUDA launcher of norms in 8 bits (sm_90a): check, fill in the parameters, launch on clusters.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "host/message.h"
#include "kvblock/norm_cast.h"
#include "ops/cast/norm_cast_kernel.cuh"

namespace kvblock {
namespace {

std::string CheckDevice() {
  int device = 0, major = 0, minor = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  if (status != cudaSuccess) return cudaGetErrorString(status);
  if (major == 9 && minor == 0) return "";
  return "the kernel runs on GPUs of compute capability 9.0, this one has " +
         std::to_string(major) + "." + std::to_string(minor) + "; use implementation='xla' or None";
}

template <typename T, int kFormat, int kThreads, bool kSum>
const char* Launch(const kvblock_norm_cast& a, cudaStream_t stream) {
  const int64_t part = kvblock_norm_cast_part(a.columns);
  NormCastParams p{};
  p.x = a.x;
  p.residual = a.residual;
  p.gamma = a.gamma;
  p.scale = a.scale;
  p.sum = a.sum;
  p.out = static_cast<uint8_t*>(a.out);
  p.transposed = static_cast<uint8_t*>(a.transposed);
  p.largest = a.largest;
  p.inverse_rms = a.inverse_rms;
  p.rows = static_cast<int32_t>(a.rows);
  p.columns = static_cast<int32_t>(a.columns);
  p.parts = static_cast<int32_t>((a.columns + part - 1) / part);
  p.wide_gamma = a.gamma_dtype == KVBLOCK_CAST_F32;
  p.eps = a.eps;
  const auto kernel = NormCast<T, kFormat, kThreads, kSum>;
  constexpr int kBytes = sizeof(NormShared<T, kThreads>);
  cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  // More than eight CTAs in a cluster are Hopper's own.
  if (status == cudaSuccess && p.parts > 8) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  const int64_t tiles = (a.rows + kNormRows - 1) / kNormRows;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(p.parts), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(tiles * p.parts));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  if (status == cudaSuccess) status = cudaLaunchKernelEx(&config, kernel, p);
  if (status == cudaSuccess) return nullptr;
  return Message(std::string("norm_cast: ") + cudaGetErrorString(status));
}

template <typename T, int kFormat, int kThreads>
const char* Launch(const kvblock_norm_cast& a, cudaStream_t stream) {
  return a.residual != nullptr ? Launch<T, kFormat, kThreads, true>(a, stream)
                               : Launch<T, kFormat, kThreads, false>(a, stream);
}

template <typename T, int kFormat>
const char* Launch(const kvblock_norm_cast& a, cudaStream_t stream) {
  // Of float32 a part has 512 columns, as the check says.
  if constexpr (sizeof(T) == 2) {
    if (kvblock_norm_cast_part(a.columns) == kNormAbreast<512> * kCastColumns) {
      return Launch<T, kFormat, 512>(a, stream);
    }
  }
  return Launch<T, kFormat, 256>(a, stream);
}

template <typename T>
const char* Launch(const kvblock_norm_cast& a, cudaStream_t stream) {
  return a.format == KVBLOCK_CAST_E4M3 ? Launch<T, KVBLOCK_CAST_E4M3>(a, stream)
                                       : Launch<T, KVBLOCK_CAST_E5M2>(a, stream);
}

}  // namespace
}  // namespace kvblock

extern "C" const char* kvblock_norm_cast_cuda(const kvblock_norm_cast* a, void* stream) {
  using namespace kvblock;
  if (const char* error = kvblock_norm_cast_check(a)) return error;
  if (a->rows == 0 || a->columns == 0) return nullptr;
  const std::string error = CheckDevice();
  if (!error.empty()) return Message("norm_cast: " + error);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (a->dtype) {
    case KVBLOCK_CAST_BF16: return Launch<__nv_bfloat16>(*a, cuda_stream);
    case KVBLOCK_CAST_F16: return Launch<__half>(*a, cuda_stream);
    default: return Launch<float>(*a, cuda_stream);
  }
}
