// Launching Hopper's forward kernel: tensor maps, the grid and its order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

#include "host/tensor_map.h"
#include "ops/attention/common/launch.h"
#include "ops/attention/hopper/forward.cuh"
#include "ops/attention/hopper/forward.h"

namespace kvblock::hopper {

constexpr int kMaxDevices = 64;

// K and V of the heads that take turns under a causal mask. Every miss of L2, and every trip from
// one of its halves to the other, costs power that the clock then lacks: less than fits is better.
constexpr int64_t kForwardApartBytes = int64_t{16} << 20;

// How many heads make a section of rounds: of those whose K and V lie in L2 together, the number
// that leaves the fewest CTAs without a tile in its last round; at least about a round's worth.
inline int32_t SectionHeads(const AttentionParams& p, int64_t clusters, int heads_at_once) {
  const int64_t least = std::clamp<int64_t>(clusters / p.tiles, 1, p.num_pairs);
  const int64_t most = std::max<int64_t>(HeadsApart(p, kForwardApartBytes) / heads_at_once, least);
  const auto filled = [&](int64_t heads) {
    const int64_t items = heads * p.tiles, rounds = (items + clusters - 1) / clusters;
    return static_cast<double>(items) / static_cast<double>(rounds * clusters);
  };
  int64_t best = most;
  for (int64_t heads = most - 1; filled(best) < 0.98 && heads >= std::max(least, most / 2);
       --heads) {
    if (filled(heads) > filled(best)) best = heads;
  }
  return static_cast<int32_t>(best);
}

inline int Multiprocessors(int device) {
  static std::atomic<int> known[kMaxDevices];
  int count = device < kMaxDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (device < kMaxDevices) known[device].store(count, std::memory_order_relaxed);
  }
  return std::max(count, 1);
}

// Maps for q, k, v and o. Without keys nothing is ever loaded, but a map must have rows.
template <typename Traits>
const char* MakeForwardMaps(const kvblock_attention& a, ForwardMaps* maps) {
  const int64_t batch = a.cu_q != nullptr ? 1 : a.batch;
  const bool keys = a.kv_len > 0;
  const HeadArray q = {a.q, a.dtype, batch, a.q_len, a.num_heads, a.head_dim};
  const HeadArray k = {a.k, a.dtype, batch, a.kv_len, a.num_kv_heads, a.head_dim};
  const HeadArray v = {a.v, a.dtype, batch, a.kv_len, a.num_kv_heads, a.value_dim};
  const HeadArray o = {a.o, a.dtype, batch, a.q_len, a.num_heads, a.value_dim};
  if (const char* error = MakeTensorMap(q, Traits::kQueries, &maps->q)) return error;
  if (const char* error = MakeTensorMap(keys ? k : q, Traits::kLoadedKeys, &maps->k)) return error;
  if (const char* error = MakeTensorMap(keys ? v : q, Traits::kLoadedKeys, &maps->v)) return error;
  return MakeTensorMap(o, kConsumerRows, &maps->o);
}

// Whether the CTAs of a cluster can have heads that share K and V: then they see the same of them.
inline bool ClusterHeads(const kvblock_attention& a, int cluster) {
  return cluster > 1 && a.num_heads / a.num_kv_heads % cluster == 0;
}

template <typename Traits>
cudaError_t LaunchClusters(int64_t ctas, int shared_bytes, cudaStream_t stream,
                           const ForwardParams& p, const ForwardMaps& maps) {
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Traits::kCluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(Traits::kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = Traits::kCluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, AttentionForward<Traits>, p, maps);
}

template <typename Traits>
const char* LaunchForwardAs(const kvblock_attention& a, cudaStream_t stream) {
  ForwardParams p{MakeAttentionParams(a), -1, 0, ClusterHeads(a, Traits::kCluster)};
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
  // elsewhere the next tile when they are done. Without a free counter the
  // hardware hands out tiles as CTAs end, and no tile is loaded under the one before.
  const bool uneven = a.cu_q || a.q_lens || a.kv_lens || a.q_segments || a.tile_indices;
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  const int clusters_at_once = std::max(Multiprocessors(device) / Traits::kCluster, 1);
  int64_t ctas = std::min<int64_t>(items, clusters_at_once * Traits::kCluster);
  if (uneven) {
    p.heads_apart = HeadsApart(p, kForwardApartBytes);
    if (ctas < items) p.counter = ForwardCounter(device, a.o);
    if (p.counter < 0) ctas = items;
  } else if (ctas < items && a.window_right >= 0) {
    const int64_t clusters = ctas / Traits::kCluster;
    p.heads_apart = SectionHeads(p, clusters, heads_at_once);
    p.section_rounds = static_cast<int32_t>((p.heads_apart * tiles + clusters - 1) / clusters);
  }

  constexpr int kSharedBytes = sizeof(ForwardShared<Traits>);
  static_assert(kSharedBytes <= 227 * 1024);
  static std::atomic<uint64_t> prepared;
  const uint64_t bit = device < kMaxDevices ? uint64_t{1} << device : 0;
  if (status == cudaSuccess && (prepared.load(std::memory_order_relaxed) & bit) == 0) {
    status = cudaFuncSetAttribute(AttentionForward<Traits>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (status == cudaSuccess) prepared.fetch_or(bit, std::memory_order_relaxed);
  }
  if (status == cudaSuccess) status = LaunchClusters<Traits>(ctas, kSharedBytes, stream, p, maps);
  if (status == cudaSuccess) return nullptr;
  return Failure(status);
}

inline ForwardKind KindOf(const kvblock_attention& a) {
  if (!(a.scale > 0.0f) || a.softcap >= kLargeSoftcap || a.bias || a.tile_indices) {
    return ForwardKind::kGeneral;
  }
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

template <typename T, int kDim, int kValueDim>
const char* LaunchForwardOf(const kvblock_attention& a, cudaStream_t stream) {
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
    case ForwardKind::kCapped:
      return launch_as(std::integral_constant<ForwardKind, ForwardKind::kCapped>());
    default: return launch_as(std::integral_constant<ForwardKind, ForwardKind::kGeneral>());
  }
}

}  // namespace kvblock::hopper
