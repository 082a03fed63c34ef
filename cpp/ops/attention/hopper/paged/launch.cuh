// Launching Hopper's forward kernel over keys in the blocks of a cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "host/paged_call.h"
#include "ops/attention/contract/head_array.h"
#include "ops/attention/contract/launch.h"
#include "ops/attention/hopper/clusters.h"
#include "ops/attention/hopper/forward/kernel.cuh"
#include "ops/attention/hopper/forward/narrow_pages.cuh"
#include "ops/attention/hopper/paged/launcher.h"
#include "ops/attention/hopper/tensor_map.h"
#include "ops/attention/schedule/grid.h"
#include "ops/attention/schedule/paged_members.h"
#include "ops/attention/schedule/rounds.h"

namespace kvblock::hopper {

inline HeadArray PackedHeads(const kvblock_paged_attention& a, const void* data, int32_t dim,
                             int32_t dtype) {
  return DenseHeads(data, dtype, 1, a.calls * a.rows, a.num_heads, dim);
}

// Maps of K and V for boxes of rows of a block, if a tile is whole boxes and the driver takes them.
// Returns how many rows; 0: rows are to be copied one by one.
template <typename Traits>
int32_t MakeBlockMaps(const kvblock_paged_attention& a, ForwardMaps* maps) {
  const int32_t rows = std::gcd(a.block_size, Traits::kKeys);
  if (rows % 8 != 0 || rows < Traits::kLeastBoxRows || a.num_arrays != 1 || a.num_blocks == 0)
    return 0;
  const auto blocks = [&](const void* data, const kvblock_page_strides& s, int32_t dim) {
    return BlockArray{data,
                      a.cache_dtype,
                      {dim, a.num_kv_heads, a.block_size, a.num_blocks, a.num_layers},
                      {s.head, s.token, s.block, a.layer_stride}};
  };
  const bool made =
      MakeTensorMap(blocks(a.k[0], a.k_strides, a.head_dim), rows, &maps->k) &&
      (Traits::kNarrow || MakeTensorMap(blocks(a.v[0], a.v_strides, a.value_dim), rows, &maps->v));
  return made ? rows : 0;
}

// V^T, the columns of a key head as the heads of a row, for a tile of it.
template <typename Traits>
const char* MakeTransposedMap(const NarrowPagedForwardParams& p, ForwardMaps* maps) {
  const int64_t head = p.padded_keys * p.value_dim;
  const HeadArray values = {
      p.values,      KVBLOCK_E4M3,          p.batch, p.num_kv_heads, p.value_dim,
      p.padded_keys, head * p.num_kv_heads, head,    p.padded_keys};
  return MakeTensorMap(values, 1, &maps->v, Traits::kLoadedValueRows);
}

template <typename Traits>
typename Traits::Params MakePagedForwardParams(const kvblock_paged_attention& a, bool follows) {
  typename Traits::Params p{};
  static_cast<AttentionParams&>(p) = MakeAttentionParams(MembersOf(a));
  SetPages(a, &p);
  p.most_rows = PagedFewRows(a);
  p.counter = &CountersOf(a)->next_tile;
  const int32_t pack = HeadsOfTile(p.group, Traits::kQueries);
  p.by_pack = FastDiv(static_cast<uint32_t>(pack));
  p.queries = Traits::kQueries / pack;
  p.kv_units = p.group / pack;
  p.follows = follows;
  if constexpr (Traits::kNarrow) {
    const NarrowPlaces places(a);
    char* const workspace = static_cast<char*>(a.workspace);
    p.values = reinterpret_cast<uint8_t*>(workspace + places.values);
    p.narrow_q = reinterpret_cast<uint8_t*>(workspace + places.queries);
    p.q_scales = reinterpret_cast<float*>(workspace + places.scales);
    p.padded_keys = PagedPaddedKeys(a);
  }
  return p;
}

template <typename Traits>
const char* LaunchPagedAs(const kvblock_paged_attention& a, bool follows, cudaStream_t stream) {
  typename Traits::Params p = MakePagedForwardParams<Traits>(a, follows);
  const int64_t tiles = PagedLongTiles(a, p.queries), units = a.num_kv_heads * int64_t{p.kv_units};
  if (tiles * units == 0) return nullptr;
  if (const char* error = PlanGrid(&p, tiles, units)) return error;
  // K and V of so many key heads lie in L2 together.
  const int64_t head_bytes = int64_t{Traits::kElementBytes} * p.kv_len * (p.head_dim + p.value_dim);
  const int64_t kv_heads = kForwardSectionBytes / std::max<int64_t>(head_bytes, 1);
  p.section_pairs = static_cast<int32_t>(std::clamp<int64_t>(kv_heads * p.kv_units, 1, units));

  const int32_t pack = static_cast<int32_t>(p.by_pack.d);
  ForwardMaps maps{};
  p.box_rows = MakeBlockMaps<Traits>(a, &maps);
  const void* q = a.q;
  const char* error = nullptr;
  if constexpr (Traits::kNarrow) {
    q = p.narrow_q;
    if (p.padded_keys > 0) error = MakeTransposedMap<Traits>(p, &maps);
  }
  const int32_t q_dtype = Traits::kNarrow ? a.cache_dtype : a.dtype;
  if (!error) {
    HeadArray queries = PackedHeads(a, q, a.head_dim, q_dtype);
    if constexpr (Traits::kNarrow) queries.rows = PagedNarrowRows(a);
    error = MakeTensorMap(queries, p.queries, &maps.q, pack);
  }
  if (!error) {
    const HeadArray o = PackedHeads(a, a.o, a.value_dim, a.dtype);
    error =
        MakeTensorMap(o, std::max(kConsumerRows / pack, 1), &maps.o, std::min(pack, kConsumerRows));
  }
  if (error) return error;

  Gpu gpu{};
  if (const char* error = AskGpu(&gpu)) return error;
  int64_t most = tiles * units;
  if constexpr (Traits::kSharesKeys) {
    static_assert(kLongConsumers == Traits::kConsumers);
    if (a.split_size == 0) {
      p.most_pieces = std::min(gpu.multiprocessors, kMostLongPieces);
      p.pieces = reinterpret_cast<float*>(static_cast<char*>(a.workspace) + PagedPieceBytes(a));
      p.arrived = CountersOf(a)->arrived;
      most = gpu.multiprocessors;
    }
  }
  const auto kernel = AttentionForward<Traits>;
  constexpr int kSharedBytes = sizeof(ForwardShared<Traits>);
  static_assert(kSharedBytes <= kMostSharedBytes);
  static PerDevice<bool> prepared;
  bool done = false;
  cudaError_t status = prepared.Get(gpu.device, &done, [&](bool* to) {
    *to = true;
    return AllowSharedBytes(kernel, kSharedBytes);
  });
  if (status == cudaSuccess && !follows) {
    status = cudaMemsetAsync(p.counter, 0, sizeof(PagedCounters), stream);
  }
  if (status == cudaSuccess) {
    const int64_t ctas = std::min<int64_t>(most, gpu.multiprocessors);
    status = LaunchDependentGrid(kernel, follows, dim3(static_cast<unsigned>(ctas)),
                                 Traits::kThreads, kSharedBytes, stream, p, maps);
  }
  return CudaResult(status);
}

// The launches in front of the kernel in 8 bits. They have ended when it begins, since none of
// those between them begins early.
template <typename Traits>
const char* PrepareNarrowPagedAs(const kvblock_paged_attention& a, cudaStream_t stream) {
  constexpr int kThreads = 256;
  NarrowPagedForwardParams p = MakePagedForwardParams<Traits>(a, false);
  const int64_t tiles = PagedLongTiles(a, p.queries), units = a.num_kv_heads * int64_t{p.kv_units};
  if (tiles * units == 0) return nullptr;
  p.num_pairs = static_cast<int32_t>(units);
  Gpu gpu{};
  if (const char* error = AskGpu(&gpu)) return error;
  cudaError_t status = LaunchGrid(NarrowQueries<kThreads, Traits::kQueries>,
                                  dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(units)),
                                  kThreads, 0, stream, p);
  const int64_t value_tiles = a.calls * int64_t{a.sequences} * (p.padded_keys / kTransposedKeys);
  if (status == cudaSuccess && value_tiles > 0) {
    // As many CTAs as are there at a time.
    const int64_t most = (gpu.multiprocessors * int64_t{8} + a.num_kv_heads - 1) / a.num_kv_heads;
    status = LaunchGrid(TransposePages<kThreads>,
                        dim3(static_cast<unsigned>(std::min(value_tiles, most)),
                             static_cast<unsigned>(a.num_kv_heads)),
                        kThreads, 0, stream, p);
  }
  return CudaResult(status);
}

template <int kDim>
const char* LaunchNarrowPagedOf(const kvblock_paged_attention& a, bool follows,
                                cudaStream_t stream) {
  return LaunchPagedAs<ForwardTraits<E4m3, kDim, kDim, ForwardKind::kPaged>>(a, follows, stream);
}

template <typename T, int kDim, int kValueDim>
const char* LaunchPagedOf(const kvblock_paged_attention& a, bool follows, cudaStream_t stream) {
  if (a.softcap > 0.0f) {
    return LaunchPagedAs<ForwardTraits<T, kDim, kValueDim, ForwardKind::kPagedCapped>>(a, follows,
                                                                                       stream);
  }
  return LaunchPagedAs<ForwardTraits<T, kDim, kValueDim, ForwardKind::kPaged>>(a, follows, stream);
}

}  // namespace kvblock::hopper
