// The launcher of the generic forward kernel (sm_80 and newer).
#pragma once

#include <cuda_runtime.h>

#include "host/attention_call.h"

namespace kvblock::generic {

// Serves every option of the contract; `a` has been checked, and it has queries. NULL, or what is
// wrong.
const char* LaunchForward(const AttentionCall& a, cudaStream_t stream);

// The same for one element type and padded head dim: an instance each. T is a.dtype's type, of
// float32 Tf32 or Tf32x3 (device/tf32.cuh); the larger of head_dim and value_dim is at most kDim:
// 64, 128, 192 (not of float32) or 256.
template <typename T, int kDim>
const char* LaunchForwardOf(const AttentionCall& a, cudaStream_t stream);

}  // namespace kvblock::generic
