// Instances: the kernels are compiled for an element type and padded
// head dims, each in a file of its own (CMakeLists.txt), so that they compile side by side.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "host/attention_call.h"

namespace kvblock {

// The element type and head dims of an instance.
template <typename T, int kKeyDim, int kValueDim = kKeyDim>
struct Instance {
  using Type = T;
  static constexpr int kDim = kKeyDim, kValue = kValueDim;
};

// Calls launch with the instance of these head dims that has the call's dtype.
template <int kDim, int kValueDim = kDim, typename Launch>
const char* ForType(const AttentionCall& a, const Launch& launch) {
  if (a.dtype == KVBLOCK_BF16) return launch(Instance<__nv_bfloat16, kDim, kValueDim>());
  return launch(Instance<__half, kDim, kValueDim>());
}

}  // namespace kvblock
