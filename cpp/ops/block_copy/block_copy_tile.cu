// Launching the tile kernel.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kvblock/block_copy.h"
#include "ops/block_copy/block_copy_launch.h"
#include "ops/block_copy/block_copy_params.cuh"
#include "ops/block_copy/block_copy_tile.cuh"
#include "ops/block_copy/block_copy_tiling.h"

namespace kvblock {
namespace {

constexpr int64_t kTileTargets[] = {12 << 10, 5 << 10};  // bytes of a tile; the first that fits
constexpr int kTileShared = 47 << 10;  // shared memory that needs no special permission

// How one side walks the box, the tile being laid out by `tile_strides` (units, by dim).
BoxWalk MakeWalk(const Tiling& tiling, const kvblock_side& side, const int64_t* tile_strides) {
  const kvblock_copy& copy = tiling.copy;
  std::vector<int> order = tiling.box;
  std::sort(order.begin(), order.end(),
            [&](int a, int b) { return side.strides[a] > side.strides[b]; });
  BoxWalk walk{};
  for (FastDiv& extent : walk.extents) extent = FastDiv(1);
  const size_t pad = kTileRank - order.size();
  for (size_t i = 0; i < order.size(); ++i) {
    const int k = order[i];
    walk.extents[pad + i] = FastDiv(static_cast<uint32_t>(copy.dims[k]));
    walk.strides[pad + i] = static_cast<int32_t>(side.strides[k]);
    walk.tile_strides[pad + i] = static_cast<int32_t>(tile_strides[k]);
  }
  walk.width = static_cast<int32_t>(tiling.Width(side));
  return walk;
}

// The box must not reach further than the 32-bit offsets of the tables.
bool Reachable(const Tiling& tiling, const kvblock_side& side) {
  int64_t last = 0;
  for (int k : tiling.box) last += (tiling.copy.dims[k] - 1) * side.strides[k];
  return last <= kMaxCount;
}

template <typename Kernel>
const char* ResidentBlocks(Kernel kernel, int shared, int64_t* blocks) {
  int device = 0, processors = 0, each = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (status == cudaSuccess) {
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, kTileThreads, shared);
  }
  *blocks = std::max<int64_t>(1, int64_t{processors} * each);
  return CudaError("block_copy", status);
}

template <int kUnit, int kWidth, int kTable>
const char* LaunchTiles(const Tiling& tiling, const BoxWalk& src, const BoxWalk& dst,
                        cudaStream_t stream) {
  TileParams<KVBLOCK_MAX_RANK, kTable> p{};
  p.src = src;
  p.dst = dst;
  p.box_bytes = static_cast<int32_t>(tiling.bytes);
  kvblock_copy outer = tiling.copy;
  for (int k : tiling.box) outer.dims[k] = 1;
  p.outer = MakeParams<KVBLOCK_MAX_RANK, kTable>(outer);
  const int shared = TileLayout(p.box_bytes, kUnit, src.width, kWidth).bytes;
  auto kernel = BlockCopyTile<kUnit, kWidth, KVBLOCK_MAX_RANK, kTable>;
  int64_t resident = 0;
  if (const char* error = ResidentBlocks(kernel, shared, &resident)) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(p.outer.count, resident)));
  config.blockDim = dim3(kTileThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  return CudaError("block_copy", cudaLaunchKernelEx(&config, kernel, p));
}

template <int kUnit, int kTable>
const char* LaunchTiles(const Tiling& tiling, const BoxWalk& src, const BoxWalk& dst,
                        cudaStream_t stream) {
  if (dst.width == 16) return LaunchTiles<kUnit, 16, kTable>(tiling, src, dst, stream);
  if (dst.width == 8) return LaunchTiles<kUnit, 8, kTable>(tiling, src, dst, stream);
  return LaunchTiles<kUnit, std::max(kUnit, 4), kTable>(tiling, src, dst, stream);
}

template <int kTable>
const char* LaunchTiles(const Tiling& tiling, const BoxWalk& src, const BoxWalk& dst,
                        cudaStream_t stream) {
  switch (tiling.copy.unit) {
    case 8: return LaunchTiles<8, kTable>(tiling, src, dst, stream);
    case 4: return LaunchTiles<4, kTable>(tiling, src, dst, stream);
    case 2: return LaunchTiles<2, kTable>(tiling, src, dst, stream);
    default: return LaunchTiles<1, kTable>(tiling, src, dst, stream);
  }
}

// Launches tiles of up to `target` bytes where they serve; says by `served` whether they do.
const char* TryTiles(const kvblock_copy& copy, int64_t target, cudaStream_t stream, bool* served) {
  const Tiling tiling = ChooseTiling(copy, target, kTileRank);
  if (tiling.box.empty() || !Reachable(tiling, tiling.copy.src) ||
      !Reachable(tiling, tiling.copy.dst)) {
    return nullptr;
  }
  int64_t tile_strides[KVBLOCK_MAX_RANK] = {};
  std::vector<int> order = tiling.box;  // the tile is laid out as the source walks the box
  std::sort(order.begin(), order.end(),
            [&](int a, int b) { return tiling.copy.src.strides[a] < tiling.copy.src.strides[b]; });
  int64_t stride = 1;
  for (int k : order) {
    tile_strides[k] = stride;
    stride *= tiling.copy.dims[k];
  }
  const BoxWalk src = MakeWalk(tiling, tiling.copy.src, tile_strides);
  const BoxWalk dst = MakeWalk(tiling, tiling.copy.dst, tile_strides);
  const int unit = static_cast<int>(copy.unit);
  const int least = std::max(unit, 4);
  if (src.width < least || dst.width < least) return nullptr;
  const TileLayout layout(static_cast<int32_t>(tiling.bytes), unit, src.width, dst.width);
  if (layout.bytes > kTileShared) return nullptr;
  *served = true;
  const int64_t buffers = ReachableBuffers(copy, copy.src) + ReachableBuffers(copy, copy.dst);
  return buffers <= kSmallTable ? LaunchTiles<kSmallTable>(tiling, src, dst, stream)
                                : LaunchTiles<kLargeTable>(tiling, src, dst, stream);
}

}  // namespace

const char* LaunchTiles(const kvblock_copy& copy, cudaStream_t stream, bool* served) {
  *served = false;
  for (const int64_t target : kTileTargets) {
    const char* error = TryTiles(copy, target, stream, served);
    if (*served) return error;
  }
  return nullptr;
}

}  // namespace kvblock
