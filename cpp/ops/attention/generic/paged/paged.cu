// Picks the instance of paged attention's kernels.
#include "device/widen.cuh"
#include "ops/attention/generic/instances.h"
#include "ops/attention/generic/paged/launcher.h"

namespace kvblock::generic {

const char* LaunchPaged(const kvblock_paged_attention& a, Follower follower, cudaStream_t stream) {
  AttentionCall call{};
  call.dtype = a.dtype;
  call.head_dim = a.head_dim;
  call.value_dim = a.value_dim;
  return ForInstance(call, [&](auto instance) {
    using In = decltype(instance);
    using T = typename In::Type;
    switch (a.cache_dtype) {
      case KVBLOCK_E4M3: return LaunchPagedOf<T, In::kDim, E4m3>(a, follower, stream);
      case KVBLOCK_E5M2: return LaunchPagedOf<T, In::kDim, E5m2>(a, follower, stream);
      case KVBLOCK_I8: return LaunchPagedOf<T, In::kDim, Int8>(a, follower, stream);
      default: return LaunchPagedOf<T, In::kDim, T>(a, follower, stream);
    }
  });
}

}  // namespace kvblock::generic
