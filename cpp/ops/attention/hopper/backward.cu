// The Hopper backward launchers: clear, pick the instance, launch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <string>

#include "host/block_copy_check.h"
#include "ops/attention/common/launch.h"
#include "ops/attention/hopper/backward.h"
#include "ops/attention/hopper/backward_dq.cuh"

namespace kvblock::hopper {
namespace {

const char* Checked(const char* what, cudaError_t status) {
  if (status == cudaSuccess) return nullptr;
  return Message(std::string("attention: ") + what + ": " + cudaGetErrorString(status));
}

// The float32 values of dq_accum.
int64_t DqAccumSize(const kvblock_attention& a) {
  return Members(a) * a.num_heads * DqTiles(a) * kDqRows * a.head_dim;
}

}  // namespace

const char* LaunchBackwardKv(const kvblock_attention& a, cudaStream_t stream) {
  if (a.dq_accum != nullptr) {
    const size_t bytes = sizeof(float) * DqAccumSize(a);
    const cudaError_t status = cudaMemsetAsync(a.dq_accum, 0, bytes, stream);
    if (const char* error = Checked("clearing dq_accum", status)) return error;
    if (a.dq_turns != nullptr) {
      const size_t bytes = sizeof(int32_t) * Members(a) * a.num_heads * DqTiles(a);
      const cudaError_t status = cudaMemsetAsync(a.dq_turns, 0, bytes, stream);
      if (const char* error = Checked("clearing dq_turns", status)) return error;
    }
  }
  const int dim = std::max(a.head_dim, a.value_dim);
  if (dim <= 64) return LaunchBackwardKvOf<64, 64>(a, stream);
  if (dim <= 96) return LaunchBackwardKvOf<96, 96>(a, stream);
  if (dim <= 128) return LaunchBackwardKvOf<128, 128>(a, stream);
  if (dim <= 192 && a.value_dim <= 128) return LaunchBackwardKvOf<192, 128>(a, stream);
  if (dim <= 192) return LaunchBackwardKvOf<192, 192>(a, stream);
  return LaunchBackwardKvOf<256, 256>(a, stream);
}

const char* LaunchFinishDq(const kvblock_attention& a, cudaStream_t stream) {
  AttentionParams p = MakeAttentionParams(a);
  const int64_t tiles = a.q_len == 0 ? 0 : NumTiles(a, a.q_len, kDqRows);
  const int64_t ctas = tiles * Members(a) * a.num_heads;
  if (ctas == 0) return nullptr;
  if (ctas > INT32_MAX) return Message("attention: too many queries for one launch");
  p.tiles = static_cast<int32_t>(tiles);
  const bool tall = LaunchIsTall(a);
  const auto kernel =
      a.dtype == KVBLOCK_BF16
          ? (tall ? AttentionFinishTallDq<__nv_bfloat16> : AttentionFinishDq<__nv_bfloat16>)
          : (tall ? AttentionFinishTallDq<__half> : AttentionFinishDq<__half>);
  kernel<<<static_cast<unsigned>(ctas), kWarpgroup, 0, stream>>>(p);
  return Checked("finishing dq", cudaGetLastError());
}

}  // namespace kvblock::hopper
