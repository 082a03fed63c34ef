// The launcher of the generic forward kernel; an instance for each type and padded head dim.
#pragma once

#include <cuda_runtime.h>

#include "ops/attention/common/params.cuh"

namespace kvblock {

// T is __nv_bfloat16 or __half, as a.dtype says; the larger of head_dim and value_dim is at most
// kDim: 64, 128, 192 or 256.
template <typename T, int kDim>
const char* LaunchForward(const kvblock_attention& a, cudaStream_t stream);

}  // namespace kvblock
