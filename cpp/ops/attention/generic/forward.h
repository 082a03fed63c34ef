// The launcher of the generic forward kernel; one instance for each padded head dim.
#pragma once

#include <cuda_runtime.h>

#include "ops/attention/common/params.cuh"

namespace kvblock {

// The larger of head_dim and value_dim is at most kDim: 64, 128, 192 or 256.
template <int kDim>
const char* LaunchForward(const kvblock_attention& a, cudaStream_t stream);

}  // namespace kvblock
