// Picks the instance of attention over latent caches.
#include "ops/attention/generic/latent/instances.h"
#include "ops/attention/generic/latent/launcher.h"

namespace kvblock::generic {

const char* LaunchLatent(const kvblock_paged_attention& a, cudaStream_t stream) {
  return ForLatentInstance(a, [&](auto instance) {
    using In = decltype(instance);
    return LaunchLatentOf<typename In::Type, In::kDim, In::kValue>(a, stream);
  });
}

}  // namespace kvblock::generic
