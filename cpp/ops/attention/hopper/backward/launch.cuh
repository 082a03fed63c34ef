// Launching the Hopper backward kernels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/attention/contract/head_array.h"
#include "ops/attention/contract/launch.h"
#include "ops/attention/hopper/backward/kernel.cuh"
#include "ops/attention/hopper/backward/launcher.h"
#include "ops/attention/hopper/clusters.h"
#include "ops/attention/hopper/tensor_map.h"
#include "ops/attention/schedule/grid.h"

namespace kvblock::hopper {

// Maps of a launch that has keys. Without queries nothing of theirs is loaded, but a map must have
// rows and an address.
template <typename Shape>
const char* MakeBackwardMaps(const AttentionCall& a, BackwardMaps* maps) {
  const HeadArray k = KeyHeads(a, a.k, a.head_dim), v = KeyHeads(a, a.v, a.value_dim);
  const bool queries = a.q_len > 0;
  const HeadArray q = queries ? QueryHeads(a, a.q, a.head_dim) : k;
  const HeadArray d_o = queries ? QueryHeads(a, a.d_o, a.value_dim) : v;
  const char* error = MakeTensorMap(q, Shape::kQueries, &maps->q);
  if (!error) error = MakeTensorMap(d_o, Shape::kQueries, &maps->d_o);
  if (!error) error = MakeTensorMap(k, Shape::kKeys, &maps->k);
  if (!error) error = MakeTensorMap(v, Shape::kKeys, &maps->v);
  if (!error) error = MakeTensorMap(KeyHeads(a, a.dk, a.head_dim), kStoredRows, &maps->dk);
  if (!error) error = MakeTensorMap(KeyHeads(a, a.dv, a.value_dim), kStoredRows, &maps->dv);
  return error;
}

template <typename T, typename Shape, bool kPlain>
const char* LaunchBackwardKvAs(const AttentionCall& a, KvHeads heads, cudaStream_t stream) {
  typename Shape::Params p{};
  static_cast<AttentionParams&>(p) = MakeAttentionParams(a);
  if constexpr (Shape::kDrops) p.dropout = MakeDropout(a);
  p.first_kv_head = heads.first;
  p.kv_heads = heads.count;
  const int64_t tiles = a.kv_len == 0 ? 0 : NumTiles(a, a.kv_len, Shape::kClusterKeys);
  const int64_t owners = Members(a) * heads.count;
  if (Shape::kSplitsProducts &&
      a.dq_state != nullptr) {  // its workers add, and do not look at who is first
    return Message("attention: these tiles need a dq_accum that was cleared");
  }
  if (tiles == 0 || owners == 0) return nullptr;
  if (const char* error = PlanGrid(&p, tiles, owners)) return error;
  // Heads that take turns should fit in L2 with their Q, dO and dq_accum, but fill the GPU, or the
  // last one's longest tiles would end alone. Without masks no tile is longer than another, and one
  // head after the other reads and adds least in device memory.
  constexpr int64_t kAtOnce = 128;  // CTAs, about
  const int64_t bytes = a.q_len * p.group * (int64_t{6} * a.head_dim + int64_t{2} * a.value_dim);
  const int64_t filling = std::min((kAtOnce - 1) / (tiles * Shape::kCluster) + 1, owners);
  const bool masked = a.window_left >= 0 || a.window_right >= 0 || a.cu_q != nullptr ||
                      a.q_segments != nullptr || a.tile_indices != nullptr;
  p.section_pairs = masked || a.dq_turns != nullptr
                        ? std::max(SectionOwners(p, bytes), static_cast<int32_t>(filling))
                        : 1;

  BackwardMaps maps;
  if (const char* error = MakeBackwardMaps<Shape>(a, &maps)) return error;
  const auto kernel = AttentionBackwardKv<T, Shape, kPlain>;
  cudaError_t status = AllowSharedBytes(kernel, sizeof(BackwardShared<Shape>));
  if (status == cudaSuccess) {
    status =
        LaunchClusters<Shape::kCluster>(kernel, tiles * owners * Shape::kCluster, Shape::kThreads,
                                        sizeof(BackwardShared<Shape>), stream, p, maps);
  }
  return CudaResult(status);
}

template <typename T, int kDim, int kValueDim>
const char* LaunchBackwardKvOf(const AttentionCall& a, KvHeads heads, cudaStream_t stream) {
  using Shape = BackwardShape<kDim, kValueDim>;
  using Capped = BackwardShape<kDim, kValueDim, false, true>;
  using Partial = BackwardShape<kDim, kValueDim, false, false, true>;
  using Listed = BackwardShape<kDim, kValueDim, false, false, false, true>;
  const bool plain = IsPlain(a), capped = !plain && a.bias == nullptr;
  if (a.dropout != 0) {  // and neither softcap, bias nor tiles
    using Dropped = BackwardShape<kDim, kValueDim, false, false, false, false, true>;
    return LaunchBackwardKvAs<T, Dropped, true>(a, heads, stream);
  }
  if constexpr (kDim == 128 && kValueDim == 128) {
    if (LaunchIsTall(a)) {
      return LaunchBackwardKvAs<T, BackwardShape<128, 128, true>, true>(a, heads, stream);
    }
  }
  if (a.tile_masks != nullptr) {
    return plain ? LaunchBackwardKvAs<T, Partial, true>(a, heads, stream)
                 : LaunchBackwardKvAs<T, Partial, false>(a, heads, stream);
  }
  if (a.tile_indices != nullptr && plain) {
    return LaunchBackwardKvAs<T, Listed, true>(a, heads, stream);
  }
  return plain    ? LaunchBackwardKvAs<T, Shape, true>(a, heads, stream)
         : capped ? LaunchBackwardKvAs<T, Capped, false>(a, heads, stream)
                  : LaunchBackwardKvAs<T, Shape, false>(a, heads, stream);
}

}  // namespace kvblock::hopper
