// The launchers of the generic backward kernels (sm_80 and newer).
#pragma once

#include <cuda_runtime.h>

#include "host/attention_call.h"

namespace kvblock::generic {

// Each serves every option of the contract; `a` has been checked. NULL, or what is wrong.

// Writes dk and dv. Where dq_accum is given, clears it and sums up dq / scale there.
const char* LaunchBackwardKv(const AttentionCall& a, cudaStream_t stream);
// Writes dq.
const char* LaunchBackwardQ(const AttentionCall& a, cudaStream_t stream);
// Writes dbias.
const char* LaunchBackwardBias(const AttentionCall& a, cudaStream_t stream);

// The same for one element type and padded head dim: an instance each. T is a.dtype's type, of
// float32 Tf32 or Tf32x3 (device/tf32.cuh); the larger of head_dim and value_dim is at most kDim:
// 64, 128, 192 or 256, of float32 at most 128.
template <typename T, int kDim>
const char* LaunchBackwardKvOf(const AttentionCall& a, cudaStream_t stream);
template <typename T, int kDim>
const char* LaunchBackwardQOf(const AttentionCall& a, cudaStream_t stream);
template <typename T, int kDim>
const char* LaunchBackwardBiasOf(const AttentionCall& a, cudaStream_t stream);

}  // namespace kvblock::generic
