// Picks the instance of the forward kernels for few queries.
#include "ops/attention/generic/instances.h"
#include "ops/attention/generic/split/launcher.h"

namespace kvblock::generic {

const char* LaunchSplit(const AttentionCall& a, cudaStream_t stream) {
  return ForInstance(a, [&](auto instance) {
    using In = decltype(instance);
    return LaunchSplitOf<typename In::Type, In::kDim>(a, stream);
  });
}

}  // namespace kvblock::generic
