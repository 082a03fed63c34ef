// Launching Hopper's forward kernel: tensor maps, the grid and its order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

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

inline int Multiprocessors(int device) {
  static std::atomic<int> known[kMaxDevices];
  int count = device < kMaxDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (device < kMaxDevices) known[device].store(count, std::memory_order_relaxed);
  }
  return std::max(count, 1);
}

// Maps for q, k and v. Without keys nothing is ever loaded, but a map must have rows.
template <typename Traits>
const char* MakeForwardMaps(const kvblock_attention& a, ForwardMaps* maps) {
  const int64_t batch = a.cu_q != nullptr ? 1 : a.batch;
  const bool keys = a.kv_len > 0;
  const HeadArray q = {a.q, a.dtype, batch, a.q_len, a.num_heads, a.head_dim};
  const HeadArray k = {a.k, a.dtype, batch, a.kv_len, a.num_kv_heads, a.head_dim};
  const HeadArray v = {a.v, a.dtype, batch, a.kv_len, a.num_kv_heads, a.value_dim};
  if (const char* error = MakeTensorMap(q, Traits::kQueries, &maps->q)) return error;
  if (const char* error = MakeTensorMap(keys ? k : q, Traits::kKeys, &maps->k)) return error;
  return MakeTensorMap(keys ? v : q, Traits::kKeys, &maps->v);
}

template <typename Traits>
const char* LaunchForwardAs(const kvblock_attention& a, cudaStream_t stream) {
  ForwardParams p{MakeAttentionParams(a), -1, 0};
  const int64_t tiles = NumTiles(a, a.q_len, Traits::kQueries);
  if (const char* error = PlanGrid(&p, tiles, p.num_pairs)) return error;
  const int64_t items = tiles * p.num_pairs;
  p.heads_apart = HeadsApart(p);
  ForwardMaps maps;
  if (const char* error = MakeForwardMaps<Traits>(a, &maps)) return error;

  // A CTA for each multiprocessor. Where the work of every tile is known beforehand they take fixed
  // shares, elsewhere the next tile when they are done. Without a free counter the hardware hands
  // out tiles as CTAs end, and no tile is loaded under the one before.
  const bool uneven = a.cu_q || a.q_lens || a.kv_lens || a.q_segments || a.tile_indices;
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  int64_t ctas = std::min<int64_t>(items, Multiprocessors(device));
  if (ctas < items && uneven) {
    p.counter = ForwardCounter(device, a.o);
    if (p.counter < 0) ctas = items;
  } else if (ctas < items && a.window_right >= 0) {
    p.section_rounds = static_cast<int32_t>((p.heads_apart * tiles + ctas - 1) / ctas);
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
  if (status == cudaSuccess) {
    AttentionForward<Traits>
        <<<static_cast<unsigned>(ctas), Traits::kThreads, kSharedBytes, stream>>>(p, maps);
    status = cudaGetLastError();
  }
  if (status == cudaSuccess) return nullptr;
  return Failure(status);
}

inline ForwardKind KindOf(const kvblock_attention& a) {
  const bool plain = a.scale > 0.0f && !(a.softcap > 0.0f) && !a.bias && !a.q_segments;
  if (!plain || a.tile_indices) return ForwardKind::kGeneral;
  const bool masked = a.window_left >= 0 || a.window_right >= 0 || a.cu_q || a.q_lens || a.kv_lens;
  return masked ? ForwardKind::kPlain : ForwardKind::kWide;
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
    case ForwardKind::kPlain:
      return launch_as(std::integral_constant<ForwardKind, ForwardKind::kPlain>());
    default: return launch_as(std::integral_constant<ForwardKind, ForwardKind::kGeneral>());
  }
}

// An instance.
#define KVBLOCK_HOPPER_FORWARD(dim, value_dim)                                                     \
  template <>                                                                                      \
  const char* LaunchForwardDims<dim, value_dim>(const kvblock_attention& a, cudaStream_t stream) { \
    return a.dtype == KVBLOCK_BF16 ? LaunchForwardOf<__nv_bfloat16, dim, value_dim>(a, stream)     \
                                   : LaunchForwardOf<__half, dim, value_dim>(a, stream);           \
  }

}  // namespace kvblock::hopper
