// The block copy for runs that are shorter than a vector: through a tile in shared memory.
//
// When the layouts share only short runs (5 heads' dims of 2 bytes, say), copying unit by unit
// wastes most of every memory transaction. So a thread block takes a tile: a box of inner dims large
// enough that each side holds it in contiguous segments of at least kSegment bytes.
//
//   load    walks the box in source order and brings whole vectors into shared memory, in that order;
//   store   walks the box in destination order and gathers each vector's units from shared memory.
//
// The remaining dims are the grid: one thread block, one tile.
#pragma once

#include <cstdint>

#include "ops/block_copy/block_copy_kernel.cuh"

namespace kvblock {

constexpr int kTileRank = 4;         // dims of the box
constexpr int kSegment = 128;        // bytes a side should hold contiguously
constexpr int kTileBytes = 16 << 10;  // a box larger than this is not tiled
constexpr int kTileThreads = 128;

// The box as one side walks it, outermost first; the last dim counts units or whole vectors.
struct BoxWalk {
  FastDiv units[kTileRank];     // extents in units
  int32_t smem_strides[kTileRank];  // bytes, in the tile
  int64_t strides[kTileRank];   // bytes, in this side's memory
  int32_t width;                // bytes of a vector that stays inside one contiguous segment
};

template <int kRank, int kTable>
struct TileParams {
  Params<kRank, kTable> outer;
  BoxWalk src, dst;
  int32_t box_bytes;
};

// Where byte `at` of the box lies, `at` counted in this side's order.
template <int kUnit>
__device__ __forceinline__ void Locate(const BoxWalk& walk, uint32_t at, int64_t* offset,
                                       int32_t* smem) {
  uint32_t rest = at / kUnit;
  *offset = 0;
  *smem = 0;
#pragma unroll
  for (int k = kTileRank - 1; k >= 0; --k) {
    const uint32_t outer = k > 0 ? walk.units[k](rest) : 0;
    const uint32_t c = k > 0 ? rest - outer * walk.units[k].d : rest;
    *offset += static_cast<int64_t>(c) * walk.strides[k];
    *smem += static_cast<int32_t>(c) * walk.smem_strides[k];
    rest = outer;
  }
}

template <int kUnit, int kWidth>
__device__ void LoadTile(const BoxWalk& walk, int32_t bytes, const char* from, char* tile) {
  using Vector = typename VectorOf<kWidth>::type;
  for (int32_t at = threadIdx.x * kWidth; at < bytes; at += kTileThreads * kWidth) {
    int64_t offset;
    int32_t unused;
    Locate<kUnit>(walk, at, &offset, &unused);
    Vector value{};
    if (from != nullptr) value = __ldcs(reinterpret_cast<const Vector*>(from + offset));
    *reinterpret_cast<Vector*>(tile + at) = value;
  }
}

template <int kUnit, int kWidth>
__device__ void StoreTile(const BoxWalk& walk, int32_t bytes, const char* tile, char* to) {
  using Vector = typename VectorOf<kWidth>::type;
  using Unit = typename VectorOf<kUnit>::type;
  union {
    Vector vector;
    Unit units[kWidth / kUnit];
  } value;
  for (int32_t at = threadIdx.x * kWidth; at < bytes; at += kTileThreads * kWidth) {
    int64_t offset = 0;
#pragma unroll
    for (int j = 0; j < kWidth / kUnit; ++j) {
      int64_t unit_offset;
      int32_t smem;
      Locate<kUnit>(walk, at + j * kUnit, &unit_offset, &smem);
      if (j == 0) offset = unit_offset;
      value.units[j] = *reinterpret_cast<const Unit*>(tile + smem);
    }
    __stcs(reinterpret_cast<Vector*>(to + offset), value.vector);
  }
}

template <int kUnit, int kRank, int kTable>
__global__ void __launch_bounds__(kTileThreads)
    BlockCopyTile(const __grid_constant__ TileParams<kRank, kTable> p) {
  __shared__ __align__(16) char tile[kTileBytes];
  uint32_t c[kRank], rest = blockIdx.x;
#pragma unroll
  for (int k = kRank - 1; k > 0; --k) {
    const uint32_t outer = p.outer.dims[k](rest);
    c[k] = rest - outer * p.outer.dims[k].d;
    rest = outer;
  }
  c[0] = rest;
  char* to = Address(p.outer, p.outer.dst, c);
  if (to == nullptr) return;
  const char* from = Address(p.outer, p.outer.src, c);
  switch (p.src.width) {
    case 16: LoadTile<kUnit, 16>(p.src, p.box_bytes, from, tile); break;
    case 8: LoadTile<kUnit, 8>(p.src, p.box_bytes, from, tile); break;
    default: LoadTile<kUnit, kUnit>(p.src, p.box_bytes, from, tile); break;
  }
  __syncthreads();
  switch (p.dst.width) {
    case 16: StoreTile<kUnit, 16>(p.dst, p.box_bytes, tile, to); break;
    case 8: StoreTile<kUnit, 8>(p.dst, p.box_bytes, tile, to); break;
    default: StoreTile<kUnit, kUnit>(p.dst, p.box_bytes, tile, to); break;
  }
}

}  // namespace kvblock
