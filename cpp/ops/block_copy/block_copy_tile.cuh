// The block copy for runs that are shorter than a vector: through a tile in shared memory.
//
// When the layouts share only short runs (5 elements of 2 bytes, say), copying unit by unit wastes
// most of every memory transaction. Here a tile is a box of inner dims, large enough that each side
// holds it in contiguous segments, and the same permutation serves every tile:
//
//   once      each thread block writes three tables to shared memory: where each vector of the box
//             lies on the source side, where on the destination side, and, for each unit of the
//             destination's vectors, where in the tile it comes from;
//   per tile  load    cp.async brings the box in source order, while the tile before is stored;
//             store   each thread gathers the units of a destination vector and writes it.
//
// Thread blocks are persistent and take tiles in turn. Thread 0 computes the addresses of a tile
// two tiles ahead, so nobody waits for that arithmetic.
#pragma once

#include <cstdint>

#include "device/cp_async.cuh"
#include "ops/block_copy/block_copy_kernel.cuh"

namespace kvblock {

constexpr int kTileRank = 5;  // dims of the box
constexpr int kTileThreads = 256;

// The box as one side walks it, outermost first, in units.
struct BoxWalk {
  FastDiv extents[kTileRank];
  int32_t strides[kTileRank];       // bytes, in this side's memory
  int32_t tile_strides[kTileRank];  // units, in the tile
  int32_t width;                    // bytes of a vector that stays inside one segment
};

template <int kRank, int kTable>
struct TileParams {
  Params<kRank, kTable> outer;  // the dims outside the box: one coordinate, one tile
  BoxWalk src, dst;
  int32_t box_bytes;
};

// Shared memory: two tiles, then the tables.
struct TileLayout {
  int32_t from, src_offset, dst_offset, bytes;

  __host__ __device__ TileLayout(int32_t box_bytes, int32_t unit, int32_t src_width,
                                 int32_t dst_width) {
    const int32_t tile = (box_bytes + 15) / 16 * 16;
    src_offset = 2 * tile;
    dst_offset = src_offset + (box_bytes / src_width + 3) / 4 * 16;
    from = dst_offset + (box_bytes / dst_width + 3) / 4 * 16;
    bytes = from + (box_bytes / unit * 2 + 15) / 16 * 16;
  }
};

// A unit of the box, counted in one side's order: its offset on that side, its place in the tile.
__device__ __forceinline__ void Locate(const BoxWalk& walk, uint32_t unit, int32_t* offset,
                                       int32_t* place) {
  *offset = *place = 0;
#pragma unroll
  for (int k = kTileRank - 1; k >= 0; --k) {
    const uint32_t outer = k > 0 ? walk.extents[k](unit) : 0;
    const int32_t c = static_cast<int32_t>(unit - outer * walk.extents[k].d);
    *offset += c * walk.strides[k];
    *place += c * walk.tile_strides[k];
    unit = outer;
  }
}

struct TileEnds {
  const char* from;
  char* to;  // null when the tile is not to be written
};

template <int kRank, int kTable>
__device__ TileEnds FindTile(const Params<kRank, kTable>& p, uint32_t tile) {
  if (tile >= p.count) return {nullptr, nullptr};
  uint32_t c[kRank];
#pragma unroll
  for (int k = kRank - 1; k > 0; --k) {
    const uint32_t outer = p.dims[k](tile);
    c[k] = tile - outer * p.dims[k].d;
    tile = outer;
  }
  c[0] = tile;
  return {Address(p, p.src, c), Address(p, p.dst, c)};
}

// Vectors without a source (an id outside the pool) are filled with zeros.
template <int kWidth>
__device__ void LoadTile(TileEnds ends, const int32_t* offsets, int32_t bytes, char* tile) {
  if (ends.to == nullptr) return;
  for (int32_t v = threadIdx.x; v < bytes / kWidth; v += kTileThreads) {
    const char* from = ends.from == nullptr ? nullptr : ends.from + offsets[v];
    CopyAsync<kWidth>(tile + v * kWidth, from);
  }
}

template <int kUnit, int kWidth>
__device__ void StoreTile(TileEnds ends, const int32_t* offsets, const uint16_t* from,
                          int32_t bytes, const char* tile) {
  using Unit = typename VectorOf<kUnit>::type;
  constexpr int kUnits = kWidth / kUnit;
  struct __align__(kUnits * 2 < 16 ? kUnits * 2 : 16) Places {
    uint16_t at[kUnits];
  };
  union {
    typename VectorOf<kWidth>::type vector;
    Unit units[kUnits];
  } value;
  if (ends.to == nullptr) return;
  for (int32_t v = threadIdx.x; v < bytes / kWidth; v += kTileThreads) {
    const Places places = reinterpret_cast<const Places*>(from)[v];
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      value.units[j] = reinterpret_cast<const Unit*>(tile)[places.at[j]];
    }
    __stcs(reinterpret_cast<typename VectorOf<kWidth>::type*>(ends.to + offsets[v]), value.vector);
  }
}

template <int kUnit, int kWidth, int kRank, int kTable>
__global__ void __launch_bounds__(kTileThreads)
    BlockCopyTile(const __grid_constant__ TileParams<kRank, kTable> p) {
  extern __shared__ __align__(16) char shared[];
  __shared__ TileEnds ends[3];
  const TileLayout layout(p.box_bytes, kUnit, p.src.width, kWidth);
  const int32_t tile_bytes = layout.src_offset / 2;
  int32_t* src_offsets = reinterpret_cast<int32_t*>(shared + layout.src_offset);
  int32_t* dst_offsets = reinterpret_cast<int32_t*>(shared + layout.dst_offset);
  uint16_t* from = reinterpret_cast<uint16_t*>(shared + layout.from);

  // Once: the tables.
  for (int32_t u = threadIdx.x; u < p.box_bytes / kUnit; u += kTileThreads) {
    int32_t offset, place;
    Locate(p.src, u, &offset, &place);
    if (u * kUnit % p.src.width == 0) src_offsets[u * kUnit / p.src.width] = offset;
    Locate(p.dst, u, &offset, &place);
    if (u * kUnit % kWidth == 0) dst_offsets[u * kUnit / kWidth] = offset;
    from[u] = static_cast<uint16_t>(place);
  }
  uint32_t tile = blockIdx.x;
  if (threadIdx.x < 2) ends[threadIdx.x] = FindTile(p.outer, tile + threadIdx.x * gridDim.x);
  __syncthreads();

  auto load = [&](int32_t turn) {
    char* to = shared + (turn & 1) * tile_bytes;
    const TileEnds e = ends[turn % 3];
    switch (p.src.width) {
      case 16: LoadTile<16>(e, src_offsets, p.box_bytes, to); break;
      case 8: LoadTile<8>(e, src_offsets, p.box_bytes, to); break;
      default: LoadTile<4>(e, src_offsets, p.box_bytes, to); break;
    }
    CopyAsyncCommit();
  };
  load(0);
  for (int32_t turn = 0; tile < p.outer.count; ++turn, tile += gridDim.x) {
    load(turn + 1);  // past the last tile this loads nothing
    CopyAsyncWait<1>();
    __syncthreads();  // the tile of this turn is here
    StoreTile<kUnit, kWidth>(ends[turn % 3], dst_offsets, from, p.box_bytes,
                             shared + (turn & 1) * tile_bytes);
    if (threadIdx.x == 0) ends[(turn + 2) % 3] = FindTile(p.outer, tile + 2 * gridDim.x);
    __syncthreads();  // its buffer is free, and the ends of the tile after next are known
  }
}

}  // namespace kvblock
