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
#include "ops/attention/hopper/paged/launcher.h"
#include "ops/attention/hopper/tensor_map.h"
#include "ops/attention/schedule/grid.h"
#include "ops/attention/schedule/paged_members.h"
#include "ops/attention/schedule/rounds.h"

namespace kvblock::hopper {

// How many of the heads of a group are rows of one tile: a divisor, the largest that leaves at most
// a tenth of a tile's rows without a query, or the one that leaves the fewest.
inline int32_t HeadsOfTile(int32_t group, int32_t rows) {
  int32_t best = 1;
  for (int32_t heads = 1; heads <= std::min(group, rows); ++heads) {
    if (group % heads == 0 && rows / heads * heads * 10 >= rows * 9) best = heads;
  }
  return best;
}

inline HeadArray PackedHeads(const kvblock_paged_attention& a, const void* data, int32_t dim) {
  return DenseHeads(data, a.dtype, 1, a.calls * a.rows, a.num_heads, dim);
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
                      a.dtype,
                      {dim, a.num_kv_heads, a.block_size, a.num_blocks, a.num_layers},
                      {s.head, s.token, s.block, a.layer_stride}};
  };
  const bool made = MakeTensorMap(blocks(a.k[0], a.k_strides, a.head_dim), rows, &maps->k) &&
                    MakeTensorMap(blocks(a.v[0], a.v_strides, a.value_dim), rows, &maps->v);
  return made ? rows : 0;
}

template <typename Traits>
PagedForwardParams MakePagedForwardParams(const kvblock_paged_attention& a, bool follows) {
  PagedForwardParams p{};
  static_cast<AttentionParams&>(p) = MakeAttentionParams(MembersOf(a));
  SetPages(a, &p);
  p.most_rows = PagedFewRows(a);
  p.counter = &CountersOf(a)->next_tile;
  const int32_t pack = HeadsOfTile(p.group, Traits::kQueries);
  p.by_pack = FastDiv(static_cast<uint32_t>(pack));
  p.queries = Traits::kQueries / pack;
  p.kv_units = p.group / pack;
  p.follows = follows;
  return p;
}

template <typename Traits>
const char* LaunchPagedAs(const kvblock_paged_attention& a, bool follows, cudaStream_t stream) {
  PagedForwardParams p = MakePagedForwardParams<Traits>(a, follows);
  const int64_t tiles = PagedLongTiles(a, p.queries), units = a.num_kv_heads * int64_t{p.kv_units};
  if (tiles * units == 0) return nullptr;
  if (const char* error = PlanGrid(&p, tiles, units)) return error;
  // K and V of so many key heads lie in L2 together.
  const int64_t head_bytes = int64_t{2} * p.kv_len * (p.head_dim + p.value_dim);
  const int64_t kv_heads = kForwardSectionBytes / std::max<int64_t>(head_bytes, 1);
  p.section_pairs = static_cast<int32_t>(std::clamp<int64_t>(kv_heads * p.kv_units, 1, units));

  const int32_t pack = static_cast<int32_t>(p.by_pack.d);
  ForwardMaps maps{};
  p.box_rows = MakeBlockMaps<Traits>(a, &maps);
  const char* error = MakeTensorMap(PackedHeads(a, a.q, a.head_dim), p.queries, &maps.q, pack);
  if (!error) {
    error = MakeTensorMap(PackedHeads(a, a.o, a.value_dim), std::max(kConsumerRows / pack, 1),
                          &maps.o, std::min(pack, kConsumerRows));
  }
  if (error) return error;

  Gpu gpu{};
  if (const char* error = AskGpu(&gpu)) return error;
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
    status = cudaMemsetAsync(p.counter, 0, sizeof(unsigned), stream);
  }
  if (status == cudaSuccess) {
    const int64_t ctas = std::min<int64_t>(tiles * units, gpu.multiprocessors);
    status = LaunchDependentGrid(kernel, follows, dim3(static_cast<unsigned>(ctas)),
                                 Traits::kThreads, kSharedBytes, stream, p, maps);
  }
  return CudaResult(status);
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
