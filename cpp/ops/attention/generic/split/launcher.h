// The launcher of the attention forward kernels for few queries (sm_80 and newer).
#pragma once

#include <cuda_runtime.h>

#include "kvblock/attention.h"

namespace kvblock::generic {

// Serves what KVBLOCK_FORWARD_SPLIT does; `a` has been checked, and it has queries. `pieces` has
// the size that kvblock_attention_workspace tells. NULL, or what is wrong.
const char* LaunchSplit(const kvblock_attention& a, float* pieces, cudaStream_t stream);

// The same for one element type and padded head dim: an instance each. T is a.dtype's type; the
// larger of head_dim and value_dim is at most kDim: 64, 128, 192 or 256.
template <typename T, int kDim>
const char* LaunchSplitOf(const kvblock_attention& a, float* pieces, cudaStream_t stream);

}  // namespace kvblock::generic
