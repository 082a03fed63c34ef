// The launcher of Hopper's kernel for latent caches (sm_90a).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "kvblock/paged_attention.h"
#include "ops/attention/schedule/pages.cuh"

namespace kvblock::hopper {

// How the copy engine sees q and the cache, and how many rows of a block it copies at a time.
struct LatentMaps {
  CUtensorMap q, k;
  int32_t box_rows;
};

constexpr int kLatentTileKeys = 64;

// Whether the kernel serves a call on the current GPU; then the maps are those of the call. Rows of
// a tile are so many.
bool ServesLatent(const kvblock_paged_attention& a, int32_t rows, LatentMaps* maps);

// The CTAs that compute so many shares, p.piece_ctas each; who combines follows.
cudaError_t LaunchLatentShares(const PagedParams& p, const LatentMaps& maps, unsigned shares,
                               cudaStream_t stream);

// The same for one element type, head dim and value dim: an instance each.
template <typename T, int kDim, int kValueDim>
cudaError_t LaunchLatentSharesOf(const PagedParams& p, const LatentMaps& maps, unsigned shares,
                                 cudaStream_t stream);

}  // namespace kvblock::hopper
