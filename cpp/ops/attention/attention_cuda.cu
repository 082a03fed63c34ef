// The CUDA launchers of attention: check, and hand the call to the kernels that it asks for.
#include <cuda_runtime.h>

#include "host/attention_call.h"
#include "host/attention_workspace.h"
#include "kvblock/attention.h"
#include "ops/attention/generic/backward/launcher.h"
#include "ops/attention/generic/forward/launcher.h"
#include "ops/attention/generic/split/launcher.h"
#include "ops/attention/hopper/backward/launcher.h"
#include "ops/attention/hopper/forward/launcher.h"

using namespace kvblock;

extern "C" const char* kvblock_attention_forward(const kvblock_forward* a, void* stream) {
  if (const char* error = kvblock_attention_check_forward(a)) return error;
  const AttentionCall call = CallOf(*a);
  if (call.q_len == 0 || (call.batch == 0 && call.cu_q == nullptr)) return nullptr;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (call.workspace != nullptr && SharesKeys(a->call) && !call.joins) {
    return generic::LaunchSplit(call, cuda_stream);
  }
  return call.kernels == KVBLOCK_KERNELS_SM90 ? hopper::LaunchForward(call, cuda_stream)
                                              : generic::LaunchForward(call, cuda_stream);
}

extern "C" const char* kvblock_attention_backward_kv(const kvblock_backward* a, void* stream) {
  if (const char* error = kvblock_attention_check_backward(a, KVBLOCK_BACKWARD_KV)) return error;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return a->call.kernels == KVBLOCK_KERNELS_SM90
             ? hopper::LaunchBackwardKv(CallWithDqOf(*a), cuda_stream)
             : generic::LaunchBackwardKv(CallOf(*a), cuda_stream);
}

extern "C" const char* kvblock_attention_backward_q(const kvblock_backward* a, void* stream) {
  if (const char* error = kvblock_attention_check_backward(a, KVBLOCK_BACKWARD_Q)) return error;
  return generic::LaunchBackwardQ(CallOf(*a), static_cast<cudaStream_t>(stream));
}

extern "C" const char* kvblock_attention_backward_bias(const kvblock_backward* a, void* stream) {
  if (const char* error = kvblock_attention_check_backward(a, KVBLOCK_BACKWARD_BIAS)) return error;
  if (a->call.batch == 0) return nullptr;
  return generic::LaunchBackwardBias(CallOf(*a), static_cast<cudaStream_t>(stream));
}
