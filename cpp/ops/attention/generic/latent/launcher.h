// The launcher of attention over latent caches (sm_80 and newer).
#pragma once

#include <cuda_runtime.h>

#include <functional>

#include "kvblock/paged_attention.h"
#include "ops/attention/schedule/pages.cuh"

namespace kvblock::generic {

// `a` has been checked, it has rows, and its values lie in its keys. NULL, or what is wrong.
const char* LaunchLatent(const kvblock_paged_attention& a, cudaStream_t stream);

// The same where another kernel computes the shares, so many, of units of PagedTileRows rows, 32 or
// 64, or of two tiles of 64 (PagedPairsTiles), and of tiles of 64 keys: p.piece_ctas CTAs a share.
using ComputeShares = std::function<cudaError_t(const PagedParams&, unsigned shares, cudaStream_t)>;
const char* LaunchOtherLatent(const kvblock_paged_attention& a, const ComputeShares& compute,
                              cudaStream_t stream);

// The same for one element type, head dim and value dim: an instance each.
template <typename T, int kDim, int kValue>
const char* LaunchLatentOf(const kvblock_paged_attention& a, cudaStream_t stream);

}  // namespace kvblock::generic
