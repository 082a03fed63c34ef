// The launchers of the generic backward kernels; an instance for each type and padded head
// dim.
#pragma once

#include <cuda_runtime.h>

#include "kvblock/attention.h"

namespace kvblock {

// T is __nv_bfloat16 or __half, as a.dtype says; the larger of head_dim and value_dim is at most
// kDim: 64, 128, 192 or 256.
template <typename T, int kDim>
const char* LaunchBackwardKv(const kvblock_attention& a, cudaStream_t stream);
template <typename T, int kDim>
const char* LaunchBackwardQ(const kvblock_attention& a, cudaStream_t stream);
template <typename T, int kDim>
const char* LaunchBackwardBias(const kvblock_attention& a, cudaStream_t stream);

}  // namespace kvblock
