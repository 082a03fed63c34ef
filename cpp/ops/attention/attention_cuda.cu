// The CUDA launchers of the attention forward pass: check, pick the instance, launch.
#include <cuda_runtime.h>

#include <cstdint>

#include "host/block_copy_check.h"
#include "kvblock/attention.h"
#include "ops/attention/generic/forward.h"
#include "ops/attention/hopper/forward.h"
#include "ops/attention/instances.h"
#include "ops/attention/split/forward.h"

extern "C" const char* kvblock_attention_forward(const kvblock_attention* a, void* stream) {
  using namespace kvblock;
  if (const char* error = kvblock_attention_check(a, KVBLOCK_FORWARD)) return error;
  if (a->q_len == 0 || (a->batch == 0 && a->cu_q == nullptr)) return nullptr;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (a->kernels == KVBLOCK_KERNELS_SM90) return hopper::LaunchForward(*a, cuda_stream);
  return ForInstance(*a, [&](auto instance) {
    using In = decltype(instance);
    return LaunchForward<typename In::Type, In::kDim>(*a, cuda_stream);
  });
}

extern "C" const char* kvblock_attention_forward_split(const kvblock_attention* a, void* workspace,
                                                       void* stream) {
  using namespace kvblock;
  if (const char* error = kvblock_attention_check(a, KVBLOCK_FORWARD_SPLIT)) return error;
  if (a->q_len == 0 || a->batch == 0) return nullptr;
  if (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % 16 != 0) {
    return Message("attention: workspace must be memory on the GPU, aligned to 16 bytes");
  }
  return ForInstance(*a, [&](auto instance) {
    using In = decltype(instance);
    return LaunchSplit<typename In::Type, In::kDim>(*a, static_cast<float*>(workspace),
                                                    static_cast<cudaStream_t>(stream));
  });
}
