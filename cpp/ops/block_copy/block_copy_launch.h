// The ways to move a simplified copy on CUDA, each in a file of its own.
#ifndef KVBLOCK_OPS_BLOCK_COPY_LAUNCH_H_
#define KVBLOCK_OPS_BLOCK_COPY_LAUNCH_H_

#include <cuda_runtime.h>

#include "kvblock/block_copy.h"

namespace kvblock {

// Through tiles in shared memory; `served` says whether they serve this copy at all.
const char* LaunchTiles(const kvblock_copy& copy, cudaStream_t stream, bool* served);

// By one cudaMemcpyBatchAsync, or one cudaMemcpyAsync a run. No ids, no starts.
const char* CopyRunsBatch(const kvblock_copy& copy, cudaStream_t stream);
const char* CopyRunsAsync(const kvblock_copy& copy, cudaStream_t stream);

}  // namespace kvblock

#endif  // KVBLOCK_OPS_BLOCK_COPY_LAUNCH_H_
