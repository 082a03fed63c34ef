// Many copies in one call. The copy engine goes from one to the next without the gap of some
// microseconds that is between calls of cudaMemcpyAsync, and each costs a quarter of the host's
// time.
#ifndef KVBLOCK_HOST_COPY_BATCH_H_
#define KVBLOCK_HOST_COPY_BATCH_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <vector>

namespace kvblock {

// Whether CUDA has the call, at build time.
inline constexpr bool kHasCopyBatch = CUDART_VERSION >= 12080;

struct CopyList {
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<size_t> bytes;

  void Add(void* target, const void* source, size_t size) {
    to.push_back(target);
    from.push_back(source);
    bytes.push_back(size);
  }
};

// In one call. They run in any order; all of them after what the stream has, and before what it
// gets next.
inline cudaError_t CopyInOneCall(CopyList& list, cudaStream_t stream) {
#if CUDART_VERSION >= 12080
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;
#if CUDART_VERSION >= 13000
  return cudaMemcpyBatchAsync(const_cast<const void**>(list.to.data()), list.from.data(),
                              list.bytes.data(), list.bytes.size(), &attributes, &first, 1, stream);
#else
  size_t failed = 0;
  return cudaMemcpyBatchAsync(list.to.data(), const_cast<void**>(list.from.data()),
                              list.bytes.data(), list.bytes.size(), &attributes, &first, 1, &failed,
                              stream);
#endif
#else
  return cudaErrorNotSupported;
#endif
}

// The same, or each in a call of its own, where CUDA or the driver is older than that call.
inline cudaError_t CopyBatch(CopyList& list, cudaStream_t stream) {
  if (list.to.empty()) return cudaSuccess;
  const cudaError_t status = CopyInOneCall(list, stream);
  if (status != cudaErrorNotSupported && status != cudaErrorCallRequiresNewerDriver) return status;
  cudaGetLastError();
  for (size_t i = 0; i < list.to.size(); ++i) {
    const cudaError_t copied =
        cudaMemcpyAsync(list.to[i], list.from[i], list.bytes[i], cudaMemcpyDefault, stream);
    if (copied != cudaSuccess) return copied;
  }
  return cudaSuccess;
}

}  // namespace kvblock

#endif  // KVBLOCK_HOST_COPY_BATCH_H_
