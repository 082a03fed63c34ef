// The CUDA launcher of casts to 8 bits: check, fill in the parameters, launch.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "host/message.h"
#include "kvblock/cast.h"
#include "ops/cast/cast_kernel.cuh"

namespace kvblock {
namespace {

using Kernel = void (*)(CastParams);

template <typename T, int kFormat>
Kernel Of(bool out, bool transposed) {
  if (out && transposed) return Cast<T, kFormat, true, true>;
  if (transposed) return Cast<T, kFormat, false, true>;
  return out ? Cast<T, kFormat, true, false> : Cast<T, kFormat, false, false>;
}

template <typename T>
const char* Launch(const kvblock_cast& a, cudaStream_t stream) {
  CastParams p{};
  p.x = a.x;
  p.scale = a.scale;
  p.out = static_cast<uint8_t*>(a.out);
  p.transposed = static_cast<uint8_t*>(a.transposed);
  p.largest = a.largest;
  p.rows = static_cast<int32_t>(a.rows);
  p.columns = static_cast<int32_t>(a.columns);
  p.tiles =
      static_cast<int32_t>((a.columns + KVBLOCK_CAST_TILE_COLUMNS - 1) / KVBLOCK_CAST_TILE_COLUMNS);
  const auto down = (a.rows + KVBLOCK_CAST_TILE_ROWS - 1) / KVBLOCK_CAST_TILE_ROWS;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(down * p.tiles));
  config.blockDim = dim3(kCastThreads);
  config.stream = stream;
  const bool out = a.out != nullptr, transposed = a.transposed != nullptr;
  const Kernel kernel = a.format == KVBLOCK_CAST_E4M3 ? Of<T, KVBLOCK_CAST_E4M3>(out, transposed)
                                                      : Of<T, KVBLOCK_CAST_E5M2>(out, transposed);
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, p);
  if (status == cudaSuccess) return nullptr;
  return Message(std::string("cast: ") + cudaGetErrorString(status));
}

}  // namespace
}  // namespace kvblock

extern "C" const char* kvblock_cast_cuda(const kvblock_cast* a, void* stream) {
  using namespace kvblock;
  if (const char* error = kvblock_cast_check(a)) return error;
  if (a->rows == 0 || a->columns == 0) return nullptr;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (a->dtype) {
    case KVBLOCK_CAST_BF16: return Launch<__nv_bfloat16>(*a, cuda_stream);
    case KVBLOCK_CAST_F16: return Launch<__half>(*a, cuda_stream);
    default: return Launch<float>(*a, cuda_stream);
  }
}
