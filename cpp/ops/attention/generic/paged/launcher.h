// The launcher of paged attention's kernels (sm_80 and newer).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kvblock/paged_attention.h"

namespace kvblock::generic {

// Launches what computes the sequences with more than PagedFewRows packed rows, on the same stream:
// it may begin when the launch in front of it lets it. NULL, or what is wrong.
using Follower = const char* (*)(const kvblock_paged_attention& a, cudaStream_t stream);

// `a` has been checked, and it has rows. Without a follower, all sequences. NULL, or what is wrong.
const char* LaunchPaged(const kvblock_paged_attention& a, Follower follower, cudaStream_t stream);

// The same for one element type, padded head dim and element type of the cache: an instance each. T
// is a.dtype's type; the larger of head_dim and value_dim is at most kDim: 64, 128, 192 or 256.
// Cache is T, E4m3, E5m2 or Int8 (device/widen.cuh).
template <typename T, int kDim, typename Cache>
const char* LaunchPagedOf(const kvblock_paged_attention& a, Follower follower, cudaStream_t stream);

}  // namespace kvblock::generic
