// The launcher of the attention forward kernel for Hopper (sm_90a).
#pragma once

#include <cuda_runtime.h>

#include "host/attention_call.h"

namespace kvblock::hopper {

// Serves every option of the contract; `a` has been checked, and it has queries. NULL, or what is
// wrong.
const char* LaunchForward(const AttentionCall& a, cudaStream_t stream);

// The same for one element type and padded pair of head dim and value dim: an instance each.
template <typename T, int kDim, int kValueDim>
const char* LaunchForwardOf(const AttentionCall& a, cudaStream_t stream);

// The same in 8 bits, T being E4m3, or Int8 of queries and keys; kDim is the larger of both,
// padded.
template <typename T, int kDim>
const char* LaunchNarrowOf(const AttentionCall& a, cudaStream_t stream);

}  // namespace kvblock::hopper
