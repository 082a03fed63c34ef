// The launcher of the attention forward kernels for few queries; an instance for each type and
// padded head dim.
#pragma once

#include <cuda_runtime.h>

#include "kvblock/attention.h"

namespace kvblock {

// T is __nv_bfloat16 or __half, as a.dtype says; the larger of head_dim and value_dim is at most
// kDim: 64, 128, 192 or 256. `pieces` has the size that kvblock_attention_workspace says.
template <typename T, int kDim>
const char* LaunchSplit(const kvblock_attention& a, float* pieces, cudaStream_t stream);

}  // namespace kvblock
