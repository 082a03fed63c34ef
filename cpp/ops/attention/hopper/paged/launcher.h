// The launcher of paged attention's kernels for Hopper (sm_90a): sequences with many queries.
#pragma once

#include <cuda_runtime.h>

#include "kvblock/paged_attention.h"

namespace kvblock::hopper {

// Whether LaunchPaged serves a call on the current GPU.
bool ServesPaged(const kvblock_paged_attention& a);

// Computes the sequences of more than PagedFewRows packed rows; `a` has been checked, and it has
// rows. `follows`: the launch in front of it computes the others, and has reset the counter. NULL,
// or what is wrong.
const char* LaunchPaged(const kvblock_paged_attention& a, bool follows, cudaStream_t stream);

// With narrow_queries this comes in front of LaunchPaged, and of the launch that it follows: it
// makes what the kernel reads of q and V.
const char* PrepareNarrowPaged(const kvblock_paged_attention& a, cudaStream_t stream);

// The same as LaunchPaged in 8 bits; kDim is the larger of both head dims, padded.
template <int kDim>
const char* LaunchNarrowPagedOf(const kvblock_paged_attention& a, bool follows,
                                cudaStream_t stream);

// The same for one element type and padded pair of head dim and value dim: an instance each.
template <typename T, int kDim, int kValueDim>
const char* LaunchPagedOf(const kvblock_paged_attention& a, bool follows, cudaStream_t stream);

}  // namespace kvblock::hopper
