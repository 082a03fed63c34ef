// Picks the instance of the generic forward kernel.
#include "ops/attention/generic/forward/launcher.h"
#include "ops/attention/generic/instances.h"

namespace kvblock::generic {

const char* LaunchForward(const AttentionCall& a, cudaStream_t stream) {
  return ForAnyInstance<256>(a, [&](auto instance) {
    using In = decltype(instance);
    return LaunchForwardOf<typename In::Type, In::kDim>(a, stream);
  });
}

}  // namespace kvblock::generic
