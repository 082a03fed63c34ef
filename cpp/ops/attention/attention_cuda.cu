// The CUDA launchers of attention: check, and hand the call to the kernels that it asks for.
#include <cuda_runtime.h>

#include <cstdint>

#include "host/message.h"
#include "kvblock/attention.h"
#include "ops/attention/generic/backward/launcher.h"
#include "ops/attention/generic/forward/launcher.h"
#include "ops/attention/generic/split/launcher.h"
#include "ops/attention/hopper/backward/launcher.h"
#include "ops/attention/hopper/forward/launcher.h"

using namespace kvblock;

extern "C" const char* kvblock_attention_forward(const kvblock_attention* a, void* stream) {
  if (const char* error = kvblock_attention_check(a, KVBLOCK_FORWARD)) return error;
  if (a->q_len == 0 || (a->batch == 0 && a->cu_q == nullptr)) return nullptr;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return a->kernels == KVBLOCK_KERNELS_SM90 ? hopper::LaunchForward(*a, cuda_stream)
                                            : generic::LaunchForward(*a, cuda_stream);
}

extern "C" const char* kvblock_attention_forward_split(const kvblock_attention* a, void* workspace,
                                                       void* stream) {
  if (const char* error = kvblock_attention_check(a, KVBLOCK_FORWARD_SPLIT)) return error;
  if (a->q_len == 0 || a->batch == 0) return nullptr;
  if (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % 16 != 0) {
    return Message("attention: workspace must be memory on the GPU, aligned to 16 bytes");
  }
  return generic::LaunchSplit(*a, static_cast<float*>(workspace),
                              static_cast<cudaStream_t>(stream));
}

extern "C" const char* kvblock_attention_backward_kv(const kvblock_attention* a, void* stream) {
  if (const char* error = kvblock_attention_check(a, KVBLOCK_BACKWARD_KV)) return error;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return a->kernels == KVBLOCK_KERNELS_SM90 ? hopper::LaunchBackwardKv(*a, cuda_stream)
                                            : generic::LaunchBackwardKv(*a, cuda_stream);
}

extern "C" const char* kvblock_attention_backward_q(const kvblock_attention* a, void* stream) {
  if (const char* error = kvblock_attention_check(a, KVBLOCK_BACKWARD_Q)) return error;
  return generic::LaunchBackwardQ(*a, static_cast<cudaStream_t>(stream));
}

extern "C" const char* kvblock_attention_backward_bias(const kvblock_attention* a, void* stream) {
  if (const char* error = kvblock_attention_check(a, KVBLOCK_BACKWARD_BIAS)) return error;
  if (a->batch == 0) return nullptr;
  return generic::LaunchBackwardBias(*a, static_cast<cudaStream_t>(stream));
}
