// The CUDA launcher of block_copy: simplify, pick an instance, launch. Allocates nothing.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <vector>

#include "host/block_copy_check.h"
#include "kvblock/block_copy.h"
#include "ops/block_copy/block_copy_kernel.cuh"
#include "ops/block_copy/block_copy_tile.cuh"

namespace kvblock {
namespace {

// Two vectors a thread in blocks of 128 were the fastest of 12 shapes on an H200, for every layout
// and both directions (docs/block_copy_performance.md).
constexpr int kThreads = 128;
constexpr int kUnroll = 2;
constexpr int64_t kMaxCount = (int64_t{1} << 31) - 1;  // FastDiv's range
// Base addresses that fit in the kernel's parameters (4 KiB, or 32 KiB from CUDA 12.1).
constexpr int kOneTable = 2, kSmallTable = 224, kLargeTable = 3900;

const char* CudaError(const char* what, cudaError_t status) {
  return status == cudaSuccess ? nullptr
                               : Message(std::string(what) + ": " + cudaGetErrorString(status));
}

// The part of side.buffers that the copy can reach.
int64_t ReachableBuffers(const kvblock_copy& copy, const kvblock_side& side) {
  int64_t last = 0;
  for (int64_t k = 0; k < copy.rank; ++k) last += (copy.dims[k] - 1) * side.table_strides[k];
  if (side.start != nullptr && side.start_limit > 0) {
    last += (side.start_limit - 1) * side.start_table_stride;
  }
  return last + 1;
}

template <int kRank>
SideParams<kRank> MakeSide(const kvblock_copy& copy, const kvblock_side& side, int table_begin) {
  SideParams<kRank> p{};
  const int pad = kRank - static_cast<int>(copy.rank);
  for (int k = 0; k < copy.rank; ++k) {  // dim 0 stays first, dims of extent 1 follow it
    const int to = k == 0 ? 0 : k + pad;
    p.strides[to] = side.strides[k];
    p.table_strides[to] = static_cast<int32_t>(side.table_strides[k]);
  }
  p.table_begin = table_begin;
  p.offset = side.offset;
  p.ids = side.ids;
  p.id_outer_stride = side.id_outer_stride;
  p.id_inner_stride = side.id_inner_stride;
  p.id_inner = FastDiv(static_cast<uint32_t>(side.ids ? side.id_inner : 1));
  p.id_limit = static_cast<int32_t>(std::min(side.id_limit, kMaxCount));
  p.start = side.start;
  p.start_stride = side.start_stride;
  p.start_table_stride = static_cast<int32_t>(side.start_table_stride);
  p.start_limit = static_cast<int32_t>(std::min(side.start_limit, kMaxCount));
  return p;
}

template <int kRank, int kTable>
Params<kRank, kTable> MakeParams(const kvblock_copy& copy) {
  Params<kRank, kTable> p{};
  p.count = static_cast<uint32_t>(NumCoordinates(copy));
  for (FastDiv& dim : p.dims) dim = FastDiv(1);
  for (int k = 0; k < copy.rank; ++k) {
    p.dims[k == 0 ? 0 : k + kRank - copy.rank] = FastDiv(static_cast<uint32_t>(copy.dims[k]));
  }
  const int64_t num_src = ReachableBuffers(copy, copy.src);
  const int64_t num_dst = ReachableBuffers(copy, copy.dst);
  for (int64_t i = 0; i < num_src; ++i) p.table[i] = static_cast<char*>(copy.src.buffers[i]);
  for (int64_t i = 0; i < num_dst; ++i) {
    p.table[num_src + i] = static_cast<char*>(copy.dst.buffers[i]);
  }
  p.src = MakeSide<kRank>(copy, copy.src, 0);
  p.dst = MakeSide<kRank>(copy, copy.dst, static_cast<int>(num_src));
  return p;
}

// ---- the vector kernel
// ---------------------------------------------------------------------------

template <int kWidth, int kRank, int kTable>
const char* LaunchVectors(const kvblock_copy& copy, cudaStream_t stream) {
  const Params<kRank, kTable> p = MakeParams<kRank, kTable>(copy);
  const int64_t per_block = kThreads * kUnroll;
  const unsigned grid = static_cast<unsigned>((p.count + per_block - 1) / per_block);
  BlockCopy<kWidth, kUnroll, kRank, kTable><<<grid, kThreads, 0, stream>>>(p);
  return CudaError("block_copy", cudaGetLastError());
}

template <int kTable>
const char* LaunchVectors(const kvblock_copy& copy, cudaStream_t stream) {
  switch (copy.unit) {
    case 16:
      if (copy.rank <= 3) return LaunchVectors<16, 3, kTable>(copy, stream);
      if (copy.rank <= 5) return LaunchVectors<16, 5, kTable>(copy, stream);
      return LaunchVectors<16, KVBLOCK_MAX_RANK, kTable>(copy, stream);
    case 8: return LaunchVectors<8, KVBLOCK_MAX_RANK, kTable>(copy, stream);
    case 4: return LaunchVectors<4, KVBLOCK_MAX_RANK, kTable>(copy, stream);
    case 2: return LaunchVectors<2, KVBLOCK_MAX_RANK, kTable>(copy, stream);
    default: return LaunchVectors<1, KVBLOCK_MAX_RANK, kTable>(copy, stream);
  }
}

// ---- the tile kernel
// -----------------------------------------------------------------------------

constexpr int64_t kSegment = 128;  // bytes that each side of a tile should hold in a row
constexpr int64_t kTileTargets[] = {12 << 10, 5 << 10};  // a tile grows up to this; what fits first
constexpr int kTileShared = 47 << 10;  // shared memory that needs no special permission

// A copy whose dims `box` are the box of a tile.
struct Tiling {
  kvblock_copy copy;
  std::vector<int> box;
  int64_t bytes;  // of the box

  bool Has(int k) const { return std::find(box.begin(), box.end(), k) != box.end(); }

  // A box takes no dim along which ids are looked up or buffers change.
  bool MayTake(int k) const {
    const bool ids = copy.src.ids != nullptr || copy.dst.ids != nullptr;
    return !(k == 0 && ids) && copy.src.table_strides[k] == 0 && copy.dst.table_strides[k] == 0 &&
           copy.src.strides[k] > 0 && copy.dst.strides[k] > 0;
  }

  // Takes dim k, or its inner part when all of it is too much. Says by how much the box grew.
  int64_t Take(int k, int64_t limit) {
    int64_t factor = std::min(copy.dims[k], limit / bytes);
    while (factor > 1 && copy.dims[k] % factor != 0) --factor;
    if (factor <= 1) return 1;
    if (factor < copy.dims[k]) {
      if (copy.rank == KVBLOCK_MAX_RANK) return 1;
      Split(k, factor);
      ++k;
    }
    box.push_back(k);
    bytes *= factor;
    return factor;
  }

  // Makes dim k two dims, (dims[k] / factor, factor).
  void Split(int k, int64_t factor) {
    for (int j = static_cast<int>(copy.rank); j > k; --j) {
      copy.dims[j] = copy.dims[j - 1];
      for (kvblock_side* side : {&copy.src, &copy.dst}) {
        side->strides[j] = side->strides[j - 1];
        side->table_strides[j] = side->table_strides[j - 1];
      }
    }
    ++copy.rank;
    for (int& dim : box) dim += dim > k ? 1 : 0;
    copy.dims[k] /= factor;
    copy.dims[k + 1] = factor;
    copy.src.strides[k] *= factor;
    copy.dst.strides[k] *= factor;
  }

  // The bytes of the box that one side holds in a row, from its innermost dim on.
  int64_t Segment(const kvblock_side& side) const {
    int64_t segment = copy.unit;
    for (bool grew = true; grew;) {
      grew = false;
      for (int k : box) {
        if (side.strides[k] != segment || copy.dims[k] == 1) continue;
        segment *= copy.dims[k];
        grew = true;
        break;
      }
    }
    return segment;
  }

  // Takes the dims that continue one side's segment until it has kSegment bytes.
  void Lengthen(const kvblock_side& side, int64_t limit) {
    for (bool grew = true; grew && Segment(side) < kSegment;) {
      grew = false;
      for (int k = 0; k < copy.rank && !grew; ++k) {
        if (MayTake(k) && !Has(k) && side.strides[k] == Segment(side)) grew = Take(k, limit) > 1;
      }
    }
  }
};

Tiling ChooseTiling(const kvblock_copy& copy, int64_t target) {
  Tiling best{copy, {}, 0};
  int64_t best_segment = 2 * std::max<int64_t>(copy.unit, 4) - 1;
  // The source may take a part of the tile, so that something is left for the destination.
  for (const int64_t part : {target, target / 4, target / 16}) {
    Tiling tiling{copy, {}, copy.unit};
    tiling.Lengthen(tiling.copy.src, part);
    tiling.Lengthen(tiling.copy.dst, target);
    // Grow by further dims, the innermost first: fewer, fuller tiles.
    for (int k = static_cast<int>(tiling.copy.rank) - 1; k >= 0; --k) {
      if (tiling.MayTake(k) && !tiling.Has(k)) tiling.Take(k, target);
    }
    const int64_t segment =
        std::min({tiling.Segment(tiling.copy.src), tiling.Segment(tiling.copy.dst), kSegment});
    if (segment > best_segment && tiling.box.size() <= kTileRank) {
      best = tiling;
      best_segment = segment;
    }
  }
  return best;
}

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
  // A vector must stay inside a segment and be aligned wherever the box starts. The dims of the
  // segment itself do not count: vectors are what walks along them.
  const int64_t segment = tiling.Segment(side);
  kvblock_side loose = side;
  for (int k : tiling.box) {
    if (side.strides[k] < segment) loose.strides[k] = 0;
  }
  walk.width = static_cast<int32_t>(CommonUnit(loose, copy.rank, segment));
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
  const unsigned grid = static_cast<unsigned>(std::min<int64_t>(p.outer.count, resident));
  kernel<<<grid, kTileThreads, shared, stream>>>(p);
  return CudaError("block_copy", cudaGetLastError());
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
const char* TryTiles(const kvblock_copy& copy, int64_t target, int64_t buffers, cudaStream_t stream,
                     bool* served) {
  const Tiling tiling = ChooseTiling(copy, target);
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
  return buffers <= kSmallTable ? LaunchTiles<kSmallTable>(tiling, src, dst, stream)
                                : LaunchTiles<kLargeTable>(tiling, src, dst, stream);
}

// ---- choosing
// ------------------------------------------------------------------------------------

void Advance(kvblock_side* side, int k, int64_t steps) {
  side->offset += steps * side->strides[k];
  side->buffers += steps * side->table_strides[k];
  side->num_buffers -= steps * side->table_strides[k];
  if (k == 0 && side->ids != nullptr) side->ids += steps;
}

// Launches the copy, cut in halves until a launch has fewer than 2^31 vectors and its table fits.
const char* Launch(const kvblock_copy& copy, cudaStream_t stream) {
  const int64_t buffers = ReachableBuffers(copy, copy.src) + ReachableBuffers(copy, copy.dst);
  const bool too_many = NumCoordinates(copy) > kMaxCount;
  if (too_many || buffers > kLargeTable) {
    int cut = -1;
    for (int k = 0; k < copy.rank && cut < 0; ++k) {
      const bool table = copy.src.table_strides[k] > 0 || copy.dst.table_strides[k] > 0;
      if (copy.dims[k] > 1 && (too_many || table)) cut = k;
    }
    if (cut < 0) return Message("block_copy: a start over more buffers than a launch can hold");
    kvblock_copy low = copy, high = copy;
    low.dims[cut] = copy.dims[cut] / 2;
    high.dims[cut] = copy.dims[cut] - low.dims[cut];
    Advance(&high.src, cut, low.dims[cut]);
    Advance(&high.dst, cut, low.dims[cut]);
    if (const char* error = Launch(low, stream)) return error;
    return Launch(high, stream);
  }
  if (copy.unit <= 8) {
    bool served = false;
    for (const int64_t target : kTileTargets) {
      const char* error = TryTiles(copy, target, buffers, stream, &served);
      if (served) return error;
    }
  }
  if (buffers <= kOneTable) return LaunchVectors<kOneTable>(copy, stream);
  if (buffers <= kSmallTable) return LaunchVectors<kSmallTable>(copy, stream);
  return LaunchVectors<kLargeTable>(copy, stream);
}

// ---- the driver's own copies
// ---------------------------------------------------------------------

struct Runs {
  std::vector<void*> dst;
  std::vector<const void*> src;
  size_t bytes = 0;  // of each run
};

Runs EnumerateRuns(const kvblock_copy& copy) {
  const int last = static_cast<int>(copy.rank) - 1;
  const bool run = copy.src.strides[last] == copy.unit && copy.dst.strides[last] == copy.unit;
  kvblock_copy outer = copy;
  Runs runs;
  runs.bytes = copy.unit;
  if (run) {
    runs.bytes *= copy.dims[last];
    outer.dims[last] = 1;
  }
  const int64_t count = NumCoordinates(outer);
  runs.dst.reserve(count);
  runs.src.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i, s = copy.src.offset, d = copy.dst.offset, st = 0, dt = 0;
    for (int k = last; k >= 0; --k) {
      const int64_t c = rest % outer.dims[k];
      rest /= outer.dims[k];
      s += c * copy.src.strides[k];
      d += c * copy.dst.strides[k];
      st += c * copy.src.table_strides[k];
      dt += c * copy.dst.table_strides[k];
    }
    runs.src.push_back(static_cast<const char*>(copy.src.buffers[st]) + s);
    runs.dst.push_back(static_cast<char*>(copy.dst.buffers[dt]) + d);
  }
  return runs;
}

const char* CopyAsync(const Runs& runs, cudaStream_t stream) {
  for (size_t i = 0; i < runs.dst.size(); ++i) {
    const cudaError_t status =
        cudaMemcpyAsync(runs.dst[i], runs.src[i], runs.bytes, cudaMemcpyDefault, stream);
    if (status != cudaSuccess) return CudaError("cudaMemcpyAsync", status);
  }
  return nullptr;
}

const char* CopyBatch(Runs* runs, cudaStream_t stream) {
#if CUDART_VERSION >= 12080
  std::vector<size_t> sizes(runs->dst.size(), runs->bytes);
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;
#if CUDART_VERSION >= 13000
  const cudaError_t status =
      cudaMemcpyBatchAsync(const_cast<const void**>(runs->dst.data()), runs->src.data(),
                           sizes.data(), sizes.size(), &attributes, &first, 1, stream);
#else
  size_t failed = 0;
  const cudaError_t status =
      cudaMemcpyBatchAsync(runs->dst.data(), const_cast<void**>(runs->src.data()), sizes.data(),
                           sizes.size(), &attributes, &first, 1, &failed, stream);
#endif
  return CudaError("cudaMemcpyBatchAsync", status);
#else
  (void)runs;
  (void)stream;
  return Message("backend 'batch' needs CUDA 12.8 or newer at build time; use 'kernel' or 'async'");
#endif
}

}  // namespace
}  // namespace kvblock

extern "C" int kvblock_has_cuda(void) { return 1; }

extern "C" const char* kvblock_copy_cuda(const kvblock_copy* copy, kvblock_backend backend,
                                         void* stream) {
  using namespace kvblock;
  if (const char* error = kvblock_copy_check(copy)) return error;
  if (NumCoordinates(*copy) == 0) return nullptr;
  const kvblock_copy simple = Simplify(*copy, 16);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (backend == KVBLOCK_KERNEL) return Launch(simple, cuda_stream);
  if (copy->src.ids || copy->dst.ids || copy->src.start || copy->dst.start) {
    return Message("backends 'batch' and 'async' take no ids; use 'kernel'");
  }
  Runs runs = EnumerateRuns(simple);
  if (backend == KVBLOCK_BATCH) return CopyBatch(&runs, cuda_stream);
  if (backend == KVBLOCK_ASYNC) return CopyAsync(runs, cuda_stream);
  return Message("unknown backend " + std::to_string(static_cast<int>(backend)));
}
