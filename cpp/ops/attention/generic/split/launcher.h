// The launcher of the attention forward kernels for few queries (sm_80 and newer).
#pragma once

#include <cuda_runtime.h>

#include "host/attention_call.h"

namespace kvblock::generic {

// Serves calls that may have a workspace; `a` has been checked, and it has queries. NULL, or what
// is wrong.
const char* LaunchSplit(const AttentionCall& a, cudaStream_t stream);

// The same for one element type and padded head dim: an instance each. T is a.dtype's type; the
// larger of head_dim and value_dim is at most kDim: 64, 128, 192 or 256.
template <typename T, int kDim>
const char* LaunchSplitOf(const AttentionCall& a, cudaStream_t stream);

}  // namespace kvblock::generic
