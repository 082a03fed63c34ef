// Launching the generic forward kernel: the grid and its order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/attention/contract/launch.h"
#include "ops/attention/generic/forward/kernel.cuh"
#include "ops/attention/generic/forward/launcher.h"
#include "ops/attention/schedule/grid.h"

namespace kvblock::generic {

template <typename T, int kDim>
const char* LaunchForwardOf(const AttentionCall& a, cudaStream_t stream) {
  using Traits = ForwardTraits<T, kDim>;
  DroppingParams p = MakeDroppingParams(a);
  const int64_t tiles = NumTiles(a, a.q_len, Traits::kQueries);
  if (const char* error = PlanGrid(&p, tiles, p.num_pairs)) return error;
  const int64_t ctas = tiles * p.num_pairs;
  constexpr int64_t kElement = sizeof(T);
  p.section_pairs = SectionPairs(p, kSectionBytes * 2 / kElement);  // it counts 2 bytes for each
  cudaError_t status = cudaFuncSetAttribute(
      AttentionForward<T, kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSharedBytes);
  if (status == cudaSuccess) {
    status = LaunchGrid(AttentionForward<T, kDim>, dim3(static_cast<unsigned>(ctas)),
                        Traits::kThreads, Traits::kSharedBytes, stream, p);
  }
  return CudaResult(status);
}

}  // namespace kvblock::generic
