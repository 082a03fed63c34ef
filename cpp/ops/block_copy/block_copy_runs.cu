// The copies of the CUDA runtime, one for each contiguous run, enumerated on the host.
#include <cuda_runtime.h>

#include <utility>
#include <vector>

#include "host/block_copy_check.h"
#include "host/copy_batch.h"
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
  if (!kHasCopyBatch) {
    return Message(
        "backend 'batch' needs CUDA 12.8 or newer at build time; use 'kernel' or 'async'");
  }
  Runs runs = EnumerateRuns(copy);
  std::vector<size_t> bytes(runs.dst.size(), runs.bytes);
  CopyList list{std::move(runs.dst), std::move(runs.src), std::move(bytes)};
  return CudaError("cudaMemcpyBatchAsync", CopyInOneCall(list, stream));
}

}  // namespace kvblock
