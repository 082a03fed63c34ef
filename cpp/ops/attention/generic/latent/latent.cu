// Picks the instance of attention over latent caches.
#include "ops/attention/generic/latent/instances.h"
#include "ops/attention/generic/latent/launcher.h"
#include "ops/attention/generic/latent/other_shares.cuh"

namespace kvblock::generic {

const char* LaunchLatent(const kvblock_paged_attention& a, cudaStream_t stream) {
  return ForLatentInstance(a, [&](auto instance) {
    using In = decltype(instance);
    return LaunchLatentOf<typename In::Type, In::kDim, In::kValue>(a, stream);
  });
}

const char* LaunchOtherLatent(const kvblock_paged_attention& a, const ComputeShares& compute,
                              cudaStream_t stream) {
  return a.dtype == KVBLOCK_BF16 ? LaunchOtherLatentOf<__nv_bfloat16>(a, compute, stream)
                                 : LaunchOtherLatentOf<__half>(a, compute, stream);
}

}  // namespace kvblock::generic
