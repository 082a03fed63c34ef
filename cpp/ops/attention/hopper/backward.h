// The launchers of the Hopper backward kernels (compute capability 9.0).
#pragma once

#include <cuda_runtime.h>

#include "kvblock/attention.h"

namespace kvblock::hopper {

// Writes dk and dv. Where dq_accum is given, sums up dq / scale there, laid out as dq_tile.cuh
// says.
const char* LaunchBackwardKv(const kvblock_attention& a, cudaStream_t stream);

// Writes dq from dq_accum.
const char* LaunchFinishDq(const kvblock_attention& a, cudaStream_t stream);

// LaunchBackwardKv's instances: T is a.dtype's type, head_dim is at most kDim and value_dim at most
// kValueDim.
template <typename T, int kDim, int kValueDim>
const char* LaunchBackwardKvOf(const kvblock_attention& a, cudaStream_t stream);

}  // namespace kvblock::hopper
