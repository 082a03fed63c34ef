// The CUDA launcher of the attention forward pass: check, pick the instance, launch.
#include <cuda_runtime.h>

#include "kvblock/attention.h"
#include "ops/attention/generic/forward.h"
#include "ops/attention/hopper/forward.h"
#include "ops/attention/instances.h"

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
