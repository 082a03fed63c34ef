// The launcher of the Hopper backward kernels (compute capability 9.0).
#pragma once

#include <cuda_runtime.h>

#include "host/attention_call.h"

namespace kvblock::hopper {

// Writes dk and dv and, where it is asked for, dq, which is summed up in dq_accum (dq_tile.cuh).
// `a` has been checked. NULL, or what is wrong.
const char* LaunchBackwardKv(const AttentionCall& a, cudaStream_t stream);

// The products and sums of it for one element type and pair of padded head dims: T is a.dtype's
// type, head_dim is at most kDim and value_dim at most kValueDim. Of some of the KV heads.
struct KvHeads {
  int32_t first, count;
};
template <typename T, int kDim, int kValueDim>
const char* LaunchBackwardKvOf(const AttentionCall& a, KvHeads heads, cudaStream_t stream);

}  // namespace kvblock::hopper
