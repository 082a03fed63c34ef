// The Hopper backward launcher: clear, pick the instance, launch, finish dq.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "ops/attention/contract/instances.h"
#include "ops/attention/contract/launch.h"
#include "ops/attention/hopper/backward/dq_finish.cuh"
#include "ops/attention/hopper/backward/launcher.h"
#include "ops/attention/schedule/grid.h"

namespace kvblock::hopper {
namespace {

// Whether the first to add stores; else dq_accum is cleared (dq_state.cuh).
bool StoresFirst(const AttentionCall& a) {
  return a.head_dim <= 192 && a.value_dim <= 128 && a.tile_indices == nullptr;
}

// Writes dq from dq_accum.
const char* LaunchFinishDq(const AttentionCall& a, cudaStream_t stream) {
  AttentionParams p = MakeAttentionParams(a);
  const int64_t tiles = a.q_len == 0 ? 0 : NumTiles(a, a.q_len, kDqRows);
  const int64_t ctas = tiles * Members(a) * a.num_heads;
  if (ctas == 0) return nullptr;
  if (ctas > INT32_MAX) return Message("attention: too many queries for one launch");
  p.tiles = static_cast<int32_t>(tiles);
  if (!StoresFirst(a)) p.dq_state = nullptr;
  const bool tall = LaunchIsTall(a);
  const auto kernel =
      a.dtype == KVBLOCK_BF16
          ? (tall ? AttentionFinishTallDq<__nv_bfloat16> : AttentionFinishDq<__nv_bfloat16>)
          : (tall ? AttentionFinishTallDq<__half> : AttentionFinishDq<__half>);
  kernel<<<static_cast<unsigned>(ctas), kWarpgroup, 0, stream>>>(p);
  return CudaResult(cudaGetLastError(), "finishing dq");
}

}  // namespace

const char* LaunchBackwardKv(const AttentionCall& caller, cudaStream_t stream) {
  AttentionCall a = caller;
  if (!StoresFirst(a)) a.dq_state = nullptr;
  const int dim = std::max(a.head_dim, a.value_dim);
  if (a.dq_accum != nullptr && a.q_len > 0) {
    const int64_t tiles = Members(a) * a.num_heads * DqTiles(a);
    const auto clear = [&](const char* what, void* data, int64_t bytes_of_a_tile) {
      return CudaResult(cudaMemsetAsync(data, 0, tiles * bytes_of_a_tile, stream), what);
    };
    const char* error = StoresFirst(a)
                            ? clear("clearing dq_state", a.dq_state, kDqCounters * 4)
                            : clear("clearing dq_accum", a.dq_accum, kDqRows * a.head_dim * 4);
    if (!error && a.dq_turns) error = clear("clearing dq_turns", a.dq_turns, 4);
    if (error) return error;
  }
  const auto launch = [&](auto instance) {
    using In = decltype(instance);
    const char* error = LaunchBackwardKvOf<typename In::Type, In::kDim, In::kValue>(a, stream);
    return error != nullptr || a.dq == nullptr ? error : LaunchFinishDq(a, stream);
  };
  if (dim <= 64) return ForType<64, 64>(a, launch);
  if (dim <= 96) return ForType<96, 96>(a, launch);
  if (dim <= 128) return ForType<128, 128>(a, launch);
  if (dim <= 192 && a.value_dim <= 128) return ForType<192, 128>(a, launch);
  if (dim <= 192) return ForType<192, 192>(a, launch);
  return ForType<256, 256>(a, launch);
}

}  // namespace kvblock::hopper
