// The Hopper backward launcher: clear, pick the instance, launch, finish dq, in rounds of some
// heads each.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "ops/attention/contract/instances.h"
#include "ops/attention/contract/launch.h"
#include "ops/attention/hopper/backward/dq_finish.cuh"
#include "ops/attention/hopper/backward/launcher.h"
#include "ops/attention/hopper/lanes.h"
#include "ops/attention/mask/dropout.cuh"
#include "ops/attention/schedule/grid.h"

namespace kvblock::hopper {
namespace {

// Whether the first to add stores; else dq_accum is cleared (dq_state.cuh).
bool StoresFirst(const AttentionCall& a) {
  return a.head_dim <= 192 && a.value_dim <= 128 && (a.tile_indices == nullptr || IsPlain(a));
}

using FinishDq = void (*)(AttentionParams);
template <typename T>
FinishDq FinishDqOf(bool tall, bool adds) {
  if (tall) return adds ? AttentionFinishTallDq<T, true> : AttentionFinishTallDq<T, false>;
  return adds ? AttentionFinishDq<T, true> : AttentionFinishDq<T, false>;
}

// Writes these heads' dq from dq_accum.
const char* LaunchFinishDq(const AttentionCall& a, KvHeads heads, cudaStream_t stream) {
  AttentionParams p = MakeAttentionParams(a);
  p.scale *= MakeDropout(a).scale;
  p.first_kv_head = heads.first;
  p.kv_heads = heads.count;
  const int64_t tiles = a.q_len == 0 ? 0 : NumTiles(a, a.q_len, kDqRows);
  const int64_t ctas = tiles * Members(a) * heads.count * p.group;
  if (ctas == 0) return nullptr;
  if (ctas > INT32_MAX) return Message("attention: too many queries for one launch");
  p.tiles = static_cast<int32_t>(tiles);
  if (!StoresFirst(a)) p.dq_state = nullptr;
  const bool tall = LaunchIsTall(a), adds = a.joins != 0;
  const FinishDq kernel = a.dtype == KVBLOCK_BF16 ? FinishDqOf<__nv_bfloat16>(tall, adds)
                                                  : FinishDqOf<__half>(tall, adds);
  const dim3 grid(static_cast<unsigned>(ctas));
  return CudaResult(LaunchGrid(kernel, grid, kWarpgroup, 0, stream, p), "finishing dq");
}

// Before the sums of so many heads.
const char* ClearSums(const AttentionCall& a, KvHeads heads, cudaStream_t stream) {
  const int64_t of_heads = int64_t{heads.count} * (a.num_heads / a.num_kv_heads);
  const int64_t tiles = Members(a) * of_heads * DqTiles(a);
  const auto clear = [&](const char* what, void* data, int64_t bytes_of_a_tile) {
    return CudaResult(cudaMemsetAsync(data, 0, tiles * bytes_of_a_tile, stream), what);
  };
  const char* error = StoresFirst(a)
                          ? clear("clearing dq_state", a.dq_state, kDqCounters * 4)
                          : clear("clearing dq_accum", a.dq_accum, kDqRows * a.head_dim * 4);
  if (!error && a.dq_turns) error = clear("clearing dq_turns", a.dq_turns, 4);
  return error;
}

// The call with the sums of another lane.
AttentionCall InLane(const AttentionCall& caller, int lane) {
  AttentionCall a = caller;
  const int64_t bytes = lane * DqPlaces(a).lane_bytes;
  const auto move = [bytes](auto** place) {
    if (*place == nullptr) return;
    *place = reinterpret_cast<std::remove_reference_t<decltype(*place)>>(
        reinterpret_cast<char*>(*place) + bytes);
  };
  move(&a.dq_accum);
  move(&a.dq_state);
  move(&a.dq_turns);
  return a;
}

// dk, dv and dq of some heads.
template <typename In>
const char* LaunchRound(const AttentionCall& a, KvHeads heads, bool has_dq, cudaStream_t stream) {
  const char* error = has_dq ? ClearSums(a, heads, stream) : nullptr;
  if (!error) error = LaunchBackwardKvOf<typename In::Type, In::kDim, In::kValue>(a, heads, stream);
  if (!error && a.dq != nullptr) error = LaunchFinishDq(a, heads, stream);
  return error;
}

}  // namespace

const char* LaunchBackwardKv(const AttentionCall& caller, cudaStream_t stream) {
  AttentionCall a = caller;
  if (!StoresFirst(a)) a.dq_state = nullptr;
  const int dim = std::max(a.head_dim, a.value_dim);
  const bool has_dq = a.dq_accum != nullptr && a.q_len > 0;
  const auto launch = [&](auto instance) -> const char* {
    using In = decltype(instance);
    const int32_t at_once = has_dq ? DqKvHeads(a) : a.num_kv_heads;
    if (at_once == a.num_kv_heads) return LaunchRound<In>(a, {0, at_once}, has_dq, stream);
    Lanes lanes(stream);
    const char* error = CudaResult(lanes.Fork(), "a second stream");
    int lane = 0;
    for (KvHeads heads{0, at_once}; !error && heads.first < a.num_kv_heads;
         heads.first += at_once) {
      error = LaunchRound<In>(InLane(a, lane), heads, has_dq, lanes[lane]);
      lane = (lane + 1) % kDqLanes;
    }
    const cudaError_t joined = lanes.Join();
    // A thread has one message: that of joining would take the place of the launch's.
    return error ? error : CudaResult(joined, "joining a second stream");
  };
  if (dim <= 64) return ForType<64, 64>(a, launch);
  if (dim <= 96) return ForType<96, 96>(a, launch);
  if (dim <= 128) return ForType<128, 128>(a, launch);
  if (dim <= 192 && a.value_dim <= 128) return ForType<192, 128>(a, launch);
  if (dim <= 192) return ForType<192, 192>(a, launch);
  return ForType<256, 256>(a, launch);
}

}  // namespace kvblock::hopper
