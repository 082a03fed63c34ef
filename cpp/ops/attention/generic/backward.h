// The launchers of the generic backward kernels; one instance for each padded head dim.
#pragma once

#include <cuda_runtime.h>

#include "kvblock/attention.h"

namespace kvblock {

// The larger of head_dim and value_dim is at most kDim: 64, 128, 192 or 256.
template <int kDim>
const char* LaunchBackwardKv(const kvblock_attention& a, cudaStream_t stream);
template <int kDim>
const char* LaunchBackwardQ(const kvblock_attention& a, cudaStream_t stream);
template <int kDim>
const char* LaunchBackwardBias(const kvblock_attention& a, cudaStream_t stream);

}  // namespace kvblock
