// The CUDA launcher of paged attention: checks, and hands the call to its kernels.
#include <cuda_runtime.h>

#include <cstdint>

#include "host/message.h"
#include "host/paged_call.h"
#include "kvblock/paged_attention.h"
#include "ops/attention/generic/latent/launcher.h"
#include "ops/attention/generic/paged/launcher.h"
#include "ops/attention/hopper/latent/launcher.h"
#include "ops/attention/hopper/paged/launcher.h"

extern "C" const char* kvblock_paged_attention_forward(const kvblock_paged_attention* a,
                                                       void* stream) {
  if (const char* error = kvblock_paged_attention_check(a)) return error;
  if (a->calls == 0 || a->rows == 0) return nullptr;
  using namespace kvblock;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (a->values_in_keys) {
    hopper::LatentMaps maps;
    if (!hopper::ServesLatent(*a, PagedTileRows(*a), &maps)) {
      return generic::LaunchLatent(*a, cuda_stream);
    }
    const auto compute = [&](const PagedParams& p, unsigned shares, cudaStream_t stream) {
      return hopper::LaunchLatentShares(p, maps, shares, stream);
    };
    return generic::LaunchOtherLatent(*a, compute, cuda_stream);
  }
  // Only the device knows the lengths: where some sequences may be long and others not, both
  // launch.
  const bool some = SomeMayBeLong(*a) && !RowsDiffer(*a) && hopper::ServesPaged(*a);
  if (a->narrow_queries && SomeMayBeLong(*a)) {
    if (!some)
      return Message("paged_attention: narrow_queries needs a Hopper GPU, and its kernels");
    if (const char* error = hopper::PrepareNarrowPaged(*a, cuda_stream)) return error;
  }
  if (some && AllAreLong(*a)) return hopper::LaunchPaged(*a, false, cuda_stream);
  const generic::Follower follower = [](const kvblock_paged_attention& a, cudaStream_t stream) {
    return hopper::LaunchPaged(a, true, stream);
  };
  return generic::LaunchPaged(*a, some ? follower : nullptr, cuda_stream);
}
