// Stands in for the Hopper kernels in a build without 90a among its architectures.
#include "ops/attention/hopper/backward/launcher.h"
#include "ops/attention/hopper/forward/launcher.h"
#include "ops/attention/hopper/latent/launcher.h"
#include "ops/attention/hopper/paged/launcher.h"

namespace kvblock::hopper {
namespace {
constexpr char kMissing[] =
    "this build of jax_kvblock has no sm_90a kernels; rebuild it with 90a among CUDA_ARCHS";
}  // namespace

const char* LaunchForward(const AttentionCall&, cudaStream_t) { return kMissing; }
const char* LaunchBackwardKv(const AttentionCall&, cudaStream_t) { return kMissing; }

bool ServesPaged(const kvblock_paged_attention&) { return false; }
const char* LaunchPaged(const kvblock_paged_attention&, bool, cudaStream_t) { return kMissing; }
const char* PrepareNarrowPaged(const kvblock_paged_attention&, cudaStream_t) { return kMissing; }

bool ServesLatent(const kvblock_paged_attention&, int32_t, LatentMaps*) { return false; }
cudaError_t LaunchLatentShares(const PagedParams&, const LatentMaps&, unsigned, cudaStream_t) {
  return cudaErrorNotSupported;
}

}  // namespace kvblock::hopper
