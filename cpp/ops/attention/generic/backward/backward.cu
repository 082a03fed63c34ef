// The generic backward launchers: clear, pick the instance, launch.
#include "ops/attention/contract/launch.h"
#include "ops/attention/generic/backward/dq_rows.h"
#include "ops/attention/generic/backward/launcher.h"
#include "ops/attention/generic/instances.h"

namespace kvblock::generic {

const char* LaunchBackwardKv(const AttentionCall& a, cudaStream_t stream) {
  if (a.dq_accum != nullptr) {
    const size_t bytes = sizeof(float) * a.num_heads * DqRows(a) * a.head_dim;
    const cudaError_t status = cudaMemsetAsync(a.dq_accum, 0, bytes, stream);
    if (const char* error = CudaResult(status, "clearing dq_accum")) return error;
  }
  return ForAnyInstance<128>(a, [&](auto instance) {
    using In = decltype(instance);
    return LaunchBackwardKvOf<typename In::Type, In::kDim>(a, stream);
  });
}

const char* LaunchBackwardQ(const AttentionCall& a, cudaStream_t stream) {
  return ForAnyInstance<128>(a, [&](auto instance) {
    using In = decltype(instance);
    return LaunchBackwardQOf<typename In::Type, In::kDim>(a, stream);
  });
}

const char* LaunchBackwardBias(const AttentionCall& a, cudaStream_t stream) {
  return ForAnyInstance<128>(a, [&](auto instance) {
    using In = decltype(instance);
    return LaunchBackwardBiasOf<typename In::Type, In::kDim>(a, stream);
  });
}

}  // namespace kvblock::generic
