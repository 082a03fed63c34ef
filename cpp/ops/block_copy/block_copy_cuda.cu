// The CUDA launcher of block_copy: simplify, pick an instance, launch. Allocates nothing.
#include <cuda_runtime.h>

#include <string>

#include "host/block_copy_check.h"
#include "host/message.h"
#include "kvblock/block_copy.h"
#include "ops/block_copy/block_copy_kernel.cuh"
#include "ops/block_copy/block_copy_launch.h"
#include "ops/block_copy/block_copy_params.cuh"

namespace kvblock {
namespace {

// Two vectors a thread in blocks of 128 were the fastest of 12 shapes on an H200, for every layout
// and both directions (docs/block_copy_log.md).
constexpr int kThreads = 128;
constexpr int kUnroll = 2;

template <int kWidth, int kRank, int kTable>
const char* LaunchVectors(const kvblock_copy& copy, cudaStream_t stream) {
  const Params<kRank, kTable> p = MakeParams<kRank, kTable>(copy);
  const int64_t per_block = kThreads * kUnroll;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((p.count + per_block - 1) / per_block));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return CudaError("block_copy",
                   cudaLaunchKernelEx(&config, BlockCopy<kWidth, kUnroll, kRank, kTable>, p));
}

template <int kTable>
const char* LaunchVectors(const kvblock_copy& copy, cudaStream_t stream) {
  switch (copy.unit) {
    case 16:
      if (copy.rank <= 3) return LaunchVectors<16, 3, kTable>(copy, stream);
      if (copy.rank <= 5) return LaunchVectors<16, 5, kTable>(copy, stream);
      if (copy.rank <= 6) return LaunchVectors<16, 6, kTable>(copy, stream);
      return LaunchVectors<16, KVBLOCK_MAX_RANK, kTable>(copy, stream);
    case 8: return LaunchVectors<8, KVBLOCK_MAX_RANK, kTable>(copy, stream);
    case 4: return LaunchVectors<4, KVBLOCK_MAX_RANK, kTable>(copy, stream);
    case 2: return LaunchVectors<2, KVBLOCK_MAX_RANK, kTable>(copy, stream);
    default: return LaunchVectors<1, KVBLOCK_MAX_RANK, kTable>(copy, stream);
  }
}

void Advance(kvblock_side* side, int k, int64_t steps) {
  side->offset += steps * side->strides[k];
  side->buffers += steps * side->table_strides[k];
  side->num_buffers -= steps * side->table_strides[k];
  if (k == 0 && side->ids != nullptr) side->ids += steps;
}

// Launches the copy, cut in halves until a launch has fewer than 2^31 vectors and its table fits.
const char* Launch(const kvblock_copy& copy, cudaStream_t stream) {
  const int64_t buffers = ReachableBuffers(copy, copy.src) + ReachableBuffers(copy, copy.dst);
  const bool too_many = NumCoordinates(copy) > kMaxCount;
  if (too_many || buffers > kLargeTable) {
    int cut = -1;
    for (int k = 0; k < copy.rank && cut < 0; ++k) {
      const bool table = copy.src.table_strides[k] > 0 || copy.dst.table_strides[k] > 0;
      if (copy.dims[k] > 1 && (too_many || table)) cut = k;
    }
    if (cut < 0) return Message("block_copy: a start over more buffers than a launch can hold");
    kvblock_copy low = copy, high = copy;
    low.dims[cut] = copy.dims[cut] / 2;
    high.dims[cut] = copy.dims[cut] - low.dims[cut];
    Advance(&high.src, cut, low.dims[cut]);
    Advance(&high.dst, cut, low.dims[cut]);
    if (const char* error = Launch(low, stream)) return error;
    return Launch(high, stream);
  }
  if (copy.unit <= 8) {
    bool served = false;
    const char* error = LaunchTiles(copy, stream, &served);
    if (served) return error;
  }
  if (buffers <= kOneTable) return LaunchVectors<kOneTable>(copy, stream);
  if (buffers <= kSmallTable) return LaunchVectors<kSmallTable>(copy, stream);
  return LaunchVectors<kLargeTable>(copy, stream);
}

}  // namespace
}  // namespace kvblock

extern "C" int kvblock_has_cuda(void) { return 1; }

extern "C" const char* kvblock_copy_bytes_cuda(void* to, const void* from, int64_t bytes,
                                               void* stream) {
  if (to == from || bytes <= 0) return nullptr;
  const cudaError_t status = cudaMemcpyAsync(to, from, static_cast<size_t>(bytes),
                                             cudaMemcpyDefault, static_cast<cudaStream_t>(stream));
  return status == cudaSuccess ? nullptr : kvblock::Message(cudaGetErrorString(status));
}

extern "C" const char* kvblock_copy_cuda(const kvblock_copy* copy, kvblock_backend backend,
                                         void* stream) {
  using namespace kvblock;
  if (const char* error = kvblock_copy_check(copy)) return error;
  if (NumCoordinates(*copy) == 0) return nullptr;
  const kvblock_copy simple = Simplify(*copy, 16);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (backend == KVBLOCK_KERNEL) return Launch(simple, cuda_stream);
  if (copy->src.ids || copy->dst.ids || copy->src.start || copy->dst.start) {
    return Message("backends 'batch' and 'async' take no ids; use 'kernel'");
  }
  if (backend == KVBLOCK_BATCH) return CopyRunsBatch(simple, cuda_stream);
  if (backend == KVBLOCK_ASYNC) return CopyRunsAsync(simple, cuda_stream);
  return Message("unknown backend " + std::to_string(static_cast<int>(backend)));
}
