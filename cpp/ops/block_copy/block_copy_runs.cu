// The copies of the CUDA runtime, one for each contiguous run, enumerated on the host.
#include <cuda_runtime.h>

#include <vector>

#include "host/block_copy_check.h"
#include "host/message.h"
#include "kvblock/block_copy.h"
#include "ops/block_copy/block_copy_launch.h"
#include "ops/block_copy/block_copy_params.cuh"

namespace kvblock {
namespace {

struct Runs {
  std::vector<void*> dst;
  std::vector<const void*> src;
  size_t bytes = 0;  // of each run
};

Runs EnumerateRuns(const kvblock_copy& copy) {
  const int last = static_cast<int>(copy.rank) - 1;
  const bool run = copy.src.strides[last] == copy.unit && copy.dst.strides[last] == copy.unit;
  kvblock_copy outer = copy;
  Runs runs;
  runs.bytes = copy.unit;
  if (run) {
    runs.bytes *= copy.dims[last];
    outer.dims[last] = 1;
  }
  const int64_t count = NumCoordinates(outer);
  runs.dst.reserve(count);
  runs.src.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i, s = copy.src.offset, d = copy.dst.offset, st = 0, dt = 0;
    for (int k = last; k >= 0; --k) {
      const int64_t c = rest % outer.dims[k];
      rest /= outer.dims[k];
      s += c * copy.src.strides[k];
      d += c * copy.dst.strides[k];
      st += c * copy.src.table_strides[k];
      dt += c * copy.dst.table_strides[k];
    }
    runs.src.push_back(static_cast<const char*>(copy.src.buffers[st]) + s);
    runs.dst.push_back(static_cast<char*>(copy.dst.buffers[dt]) + d);
  }
  return runs;
}

}  // namespace

const char* CopyRunsAsync(const kvblock_copy& copy, cudaStream_t stream) {
  const Runs runs = EnumerateRuns(copy);
  for (size_t i = 0; i < runs.dst.size(); ++i) {
    const cudaError_t status =
        cudaMemcpyAsync(runs.dst[i], runs.src[i], runs.bytes, cudaMemcpyDefault, stream);
    if (status != cudaSuccess) return CudaError("cudaMemcpyAsync", status);
  }
  return nullptr;
}

const char* CopyRunsBatch(const kvblock_copy& copy, cudaStream_t stream) {
#if CUDART_VERSION >= 12080
  Runs runs = EnumerateRuns(copy);
  std::vector<size_t> sizes(runs.dst.size(), runs.bytes);
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;
#if CUDART_VERSION >= 13000
  const cudaError_t status =
      cudaMemcpyBatchAsync(const_cast<const void**>(runs.dst.data()), runs.src.data(), sizes.data(),
                           sizes.size(), &attributes, &first, 1, stream);
#else
  size_t failed = 0;
  const cudaError_t status =
      cudaMemcpyBatchAsync(runs.dst.data(), const_cast<void**>(runs.src.data()), sizes.data(),
                           sizes.size(), &attributes, &first, 1, &failed, stream);
#endif
  return CudaError("cudaMemcpyBatchAsync", status);
#else
  (void)copy;
  (void)stream;
  return Message("backend 'batch' needs CUDA 12.8 or newer at build time; use 'kernel' or 'async'");
#endif
}

}  // namespace kvblock
