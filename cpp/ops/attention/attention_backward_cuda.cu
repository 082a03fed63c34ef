// The CUDA launchers of the attention backward passes: check, clear, pick the instance, launch.
#include <cuda_runtime.h>

#include <string>

#include "host/message.h"
#include "kvblock/attention.h"
#include "ops/attention/common/params.cuh"
#include "ops/attention/generic/backward.h"
#include "ops/attention/hopper/backward.h"
#include "ops/attention/instances.h"

extern "C" const char* kvblock_attention_backward_kv(const kvblock_attention* a, void* stream) {
  using namespace kvblock;
  if (const char* error = kvblock_attention_check(a, KVBLOCK_BACKWARD_KV)) return error;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (a->kernels == KVBLOCK_KERNELS_SM90) {
    const char* error = hopper::LaunchBackwardKv(*a, cuda_stream);
    if (error != nullptr || a->dq == nullptr) return error;
    return hopper::LaunchFinishDq(*a, cuda_stream);
  }
  if (a->dq_accum != nullptr) {
    const size_t bytes = sizeof(float) * a->num_heads * DqRows(*a) * a->head_dim;
    const cudaError_t status = cudaMemsetAsync(a->dq_accum, 0, bytes, cuda_stream);
    if (status != cudaSuccess) {
      return Message(std::string("attention: clearing dq_accum: ") + cudaGetErrorString(status));
    }
  }
  return ForInstance(*a, [&](auto instance) {
    using In = decltype(instance);
    return LaunchBackwardKv<typename In::Type, In::kDim>(*a, cuda_stream);
  });
}

extern "C" const char* kvblock_attention_backward_q(const kvblock_attention* a, void* stream) {
  using namespace kvblock;
  if (const char* error = kvblock_attention_check(a, KVBLOCK_BACKWARD_Q)) return error;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return ForInstance(*a, [&](auto instance) {
    using In = decltype(instance);
    return LaunchBackwardQ<typename In::Type, In::kDim>(*a, cuda_stream);
  });
}

extern "C" const char* kvblock_attention_backward_bias(const kvblock_attention* a, void* stream) {
  using namespace kvblock;
  if (const char* error = kvblock_attention_check(a, KVBLOCK_BACKWARD_BIAS)) return error;
  if (a->batch == 0) return nullptr;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return ForInstance(*a, [&](auto instance) {
    using In = decltype(instance);
    return LaunchBackwardBias<typename In::Type, In::kDim>(*a, cuda_stream);
  });
}
