// Launching Hopper's forward kernel: tensor maps, the grid and its order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "host/attention_workspace.h"
#include "ops/attention/contract/head_array.h"
#include "ops/attention/contract/launch.h"
#include "ops/attention/hopper/clusters.h"
#include "ops/attention/hopper/forward/kernel.cuh"
#include "ops/attention/hopper/forward/launcher.h"
#include "ops/attention/hopper/forward/transpose_values.cuh"
#include "ops/attention/hopper/tensor_map.h"
#include "ops/attention/schedule/grid.h"
#include "ops/attention/schedule/rounds.h"

namespace kvblock::hopper {

// V as it is loaded. Of 8 bits a key head's columns are the rows, as `heads`, of a row of V^T.
template <typename Traits>
HeadArray ValuesOf(const AttentionCall& a) {
  if constexpr (!Traits::kNarrow) return KeyHeads(a, a.v, a.value_dim);
  const int64_t keys = TransposedKeys(a), head = keys * a.value_dim;
  return {static_cast<const char*>(a.workspace) + kTransposedAt,
          KVBLOCK_E4M3,
          a.batch,
          a.num_kv_heads,
          a.value_dim,
          keys,
          head * a.num_kv_heads,
          head,
          keys};
}

// Brings V of 8 bits there, of as many batch members at a time as a grid can have.
template <typename Traits>
cudaError_t LaunchTranspose(const AttentionCall& a, cudaStream_t stream) {
  constexpr int kThreads = 256;
  if (a.kv_len == 0) return cudaSuccess;
  TransposeParams p{};
  p.heads = a.num_kv_heads;
  p.dim = a.value_dim;
  p.keys = a.kv_len;
  p.padded = TransposedKeys(a);
  constexpr int64_t kMost = 65535;
  const int64_t columns = int64_t{p.heads} * p.dim;  // of a member
  cudaError_t status = cudaSuccess;
  for (int64_t first = 0; status == cudaSuccess && first < a.batch; first += kMost) {
    p.v = static_cast<const uint8_t*>(a.v) + first * p.keys * columns;
    p.to = static_cast<uint8_t*>(a.workspace) + kTransposedAt + first * p.padded * columns;
    p.kv_lens = a.kv_lens != nullptr ? a.kv_lens + first : nullptr;
    const dim3 ctas(static_cast<unsigned>(p.padded / kTransposedKeys),
                    static_cast<unsigned>(a.num_kv_heads),
                    static_cast<unsigned>(std::min(a.batch - first, kMost)));
    status = LaunchGrid(TransposeValues<kThreads>, ctas, kThreads, 0, stream, p);
  }
  return status;
}

// Maps for q, k, v and o. Without keys nothing is ever loaded, but a map must have rows.
template <typename Traits>
const char* MakeForwardMaps(const AttentionCall& a, ForwardMaps* maps) {
  const HeadArray q = QueryHeads(a, a.q, a.head_dim);
  const HeadArray k = a.kv_len > 0 ? KeyHeads(a, a.k, a.head_dim) : q;
  const HeadArray v = a.kv_len > 0 ? ValuesOf<Traits>(a) : q;
  const int32_t out = Traits::kNarrow ? KVBLOCK_BF16 : a.dtype;
  const HeadArray o = DenseHeads(a.o, out, Members(a), a.q_len, a.num_heads, a.value_dim);
  const char* error = MakeTensorMap(q, Traits::kQueries, &maps->q);
  if (!error) error = MakeTensorMap(k, Traits::kLoadedKeys, &maps->k);
  if (!error && Traits::kNarrow && a.kv_len > 0) {
    error = MakeTensorMap(v, 1, &maps->v, Traits::kLoadedValueRows);
  } else if (!error) {
    error = MakeTensorMap(v, Traits::kLoadedKeys, &maps->v);
  }
  if (!error) error = MakeTensorMap(o, kConsumerRows, &maps->o);
  return error;
}

// Whether the CTAs of a cluster can have heads that share K and V: then they see the same of them.
inline bool ClusterHeads(const AttentionCall& a, int cluster) {
  return cluster > 1 && a.num_heads / a.num_kv_heads % cluster == 0;
}

template <typename Traits>
const char* LaunchForwardAs(const AttentionCall& a, cudaStream_t stream) {
  typename Traits::Params p{};
  static_cast<AttentionParams&>(p) = MakeAttentionParams(a);
  p.cluster_heads = ClusterHeads(a, Traits::kCluster);
  const int heads_at_once = p.cluster_heads ? Traits::kCluster : 1;
  const int64_t tiles = NumTiles(a, a.q_len, Traits::kClusterQueries / heads_at_once);
  if (const char* error = PlanGrid(&p, tiles, p.num_pairs / heads_at_once)) return error;
  const int64_t items = tiles * p.num_pairs * Traits::kCluster;
  ForwardMaps maps;
  if (const char* error = MakeForwardMaps<Traits>(a, &maps)) return error;

  // A CTA for each multiprocessor; to share out work, a cluster counts as one, whose tile is that
  // of all its CTAs' queries, or of all its heads.
  // Without masks one head follows the other, so that the CTAs read the same K and V at about the
  // same time. Where the work of every tile is known beforehand they take fixed shares,
  // elsewhere the next tile when they are done. Without a workspace for the counter the
  // hardware hands out tiles as CTAs end, and no tile is loaded under the one before.
  Gpu gpu{};
  if (const char* error = AskGpu(&gpu)) return error;
  cudaError_t status = cudaSuccess;
  if constexpr (Traits::kNarrow) {
    p.q_scales = a.q_scales;
    p.k_scales = a.k_scales;
    p.v_scales = a.v_scales;
    status = LaunchTranspose<Traits>(a, stream);
  }
  if constexpr (Traits::kDrops) p.dropout = MakeDropout(a);
  const int clusters_at_once = std::max(gpu.multiprocessors / Traits::kCluster, 1);
  int64_t ctas = std::min<int64_t>(items, clusters_at_once * Traits::kCluster);
  if (IsUneven(a)) {
    p.section_pairs = SectionPairs(p, kForwardSectionBytes);
    if (ctas < items && a.workspace != nullptr) {
      p.counter = static_cast<unsigned*>(a.workspace);
      if (status == cudaSuccess) status = cudaMemsetAsync(p.counter, 0, sizeof(unsigned), stream);
    } else {
      ctas = items;
    }
  } else if (ctas < items && a.window_right >= 0) {
    const int64_t clusters = ctas / Traits::kCluster;
    p.section_pairs = SectionHeads(p, clusters, heads_at_once);
    p.section_rounds = static_cast<int32_t>((p.section_pairs * tiles + clusters - 1) / clusters);
  }

  const auto kernel = AttentionForward<Traits>;
  constexpr int kSharedBytes = sizeof(ForwardShared<Traits>);
  static_assert(kSharedBytes <= kMostSharedBytes);
  static PerDevice<bool> prepared;
  bool done = false;
  if (status == cudaSuccess) {
    status = prepared.Get(gpu.device, &done, [&](bool* to) {
      *to = true;
      return AllowSharedBytes(kernel, kSharedBytes);
    });
  }
  if (status == cudaSuccess) {
    status = LaunchClusters<Traits::kCluster>(kernel, ctas, Traits::kThreads, kSharedBytes, stream,
                                              p, maps);
  }
  return CudaResult(status);
}

inline ForwardKind KindOf(const AttentionCall& a) {
  if (a.joins) return ForwardKind::kJoined;
  if (a.dropout != 0) return ForwardKind::kDropped;  // and no option that kPlain has not
  if (!(a.scale > 0.0f) || a.softcap >= kLargeSoftcap || a.bias ||
      (a.tile_indices && a.softcap > 0.0f)) {
    return ForwardKind::kGeneral;
  }
  if (a.tile_indices) return ForwardKind::kLists;
  if (a.softcap > 0.0f) return ForwardKind::kCapped;
  if (a.cu_q || a.q_lens || a.kv_lens || a.q_segments) return ForwardKind::kPlain;
  const bool masked = a.window_left >= 0 || a.window_right >= 0;
  if (masked && ClusterHeads(a, 2)) return ForwardKind::kBand;
  // Clusters of neighbouring query tiles: not where there are few, of which one is half empty, and
  // not where a tile sees much that its neighbour does not.
  const bool pairs = a.q_len > 2048 || (a.q_len + 127) / 128 % 2 == 0;
  if (!pairs) return ForwardKind::kPlain;
  if (!masked) return ForwardKind::kWide;
  return a.window_left < 0 && a.q_len >= 8192 ? ForwardKind::kBand : ForwardKind::kPlain;
}

// Calls of 8 bits have a padded head dim for both; T: E4m3, or Int8 of queries and keys.
template <typename T, int kDim>
const char* LaunchNarrowOf(const AttentionCall& a, cudaStream_t stream) {
  const ForwardKind kind = NarrowInstanceOf(KindOf(a));
  if (kind == ForwardKind::kPlain) {
    return LaunchForwardAs<ForwardTraits<T, kDim, kDim, ForwardKind::kPlain>>(a, stream);
  }
  return LaunchForwardAs<ForwardTraits<T, kDim, kDim, ForwardKind::kBand>>(a, stream);
}

template <typename T, int kDim, int kValueDim>
const char* LaunchForwardOf(const AttentionCall& a, cudaStream_t stream) {
  const auto launch_as = [&](auto kind) {
    constexpr ForwardKind kInstance = InstanceOf(kDim, decltype(kind)::value);
    return LaunchForwardAs<ForwardTraits<T, kDim, kValueDim, kInstance>>(a, stream);
  };
  switch (KindOf(a)) {
    case ForwardKind::kWide:
      return launch_as(std::integral_constant<ForwardKind, ForwardKind::kWide>());
    case ForwardKind::kBand:
      return launch_as(std::integral_constant<ForwardKind, ForwardKind::kBand>());
    case ForwardKind::kPlain:
      return launch_as(std::integral_constant<ForwardKind, ForwardKind::kPlain>());
    case ForwardKind::kLists:
      return launch_as(std::integral_constant<ForwardKind, ForwardKind::kLists>());
    case ForwardKind::kJoined:
      if constexpr (kDim <= 128 && kValueDim <= 128) {
        return launch_as(std::integral_constant<ForwardKind, ForwardKind::kJoined>());
      }
      return Message("attention: joins is for head dims up to 128");
    case ForwardKind::kDropped:
      return launch_as(std::integral_constant<ForwardKind, ForwardKind::kDropped>());
    case ForwardKind::kCapped:
      return launch_as(std::integral_constant<ForwardKind, ForwardKind::kCapped>());
    default: return launch_as(std::integral_constant<ForwardKind, ForwardKind::kGeneral>());
  }
}

}  // namespace kvblock::hopper
