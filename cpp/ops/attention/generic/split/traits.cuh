// Sizes of the kernel for few queries (kernel.cuh): tiles, stages, warps, by head dim and rows; and
// which of them a thread has.
#pragma once

#include "device/opaque.cuh"
#include "ops/attention/generic/forward/kernel.cuh"
#include "ops/attention/generic/narrow_tile.cuh"
#include "ops/attention/generic/paged_keys.cuh"
#include "ops/attention/generic/tile.cuh"

namespace kvblock::generic {

// At most 227 KiB for the CTAs of a multiprocessor.
struct SplitShape {
  int keys, stages, ctas;  // of a tile; tiles in shared memory; CTAs on a multiprocessor
  int warps;
};
constexpr SplitShape NarrowShapeOf(int dim) {
  return dim == 64    ? SplitShape{128, 3, 2, 4}
         : dim == 128 ? SplitShape{64, 3, 2, 4}
         : dim == 192 ? SplitShape{64, 2, 2, 4}
                      : SplitShape{64, 2, 1, 4};
}
// Above 192 a tile for eight warps would leave no room for a second one.
constexpr bool HasWide(int dim) { return dim <= 192; }
constexpr SplitShape WideShapeOf(int dim) {
  return dim == 64 ? SplitShape{256, 3, 1, 8} : SplitShape{128, dim == 128 ? 3 : 2, 1, 8};
}

// kRowBlocks: of 16 packed rows in a tile; 1, 2 or 4. Keys: where keys come from, keys.cuh has what
// one is asked. kLoaders: warps that only load.
template <typename T_, int kDim_, int kRowBlocks_, template <typename> class Keys_,
          bool kWide_ = false, int kLoaders_ = 0>
struct SplitTraits {
  using T = T_;
  static constexpr bool kWide = kWide_;
  static constexpr int kDim = kDim_, kTileBlocks = kRowBlocks_, kRows = kTileBlocks * 16;
  static constexpr SplitShape kSplit = kWide ? WideShapeOf(kDim) : NarrowShapeOf(kDim);
  static constexpr int kWarps = kSplit.warps, kComputing = kWarps * 32;  // warps that compute
  static constexpr int kLoaders = kLoaders_, kThreads = kComputing + kLoaders * 32;
  static constexpr int kParts = kWarps / kTileBlocks;  // of a tile's keys
  static constexpr int kTileKeys = kSplit.keys, kStages = kSplit.stages;
  using KvTile = SharedTile<kTileKeys, kDim>;
  using Keys = Keys_<SplitTraits>;
  using Params = typename Keys::Params;
  // Whether units may be cut: wide ones over dense keys have whole ones alone.
  static constexpr bool kCombines = !kWide || Keys::kLooksUp, kNarrow = false;
  static constexpr int kStageBytes = 2 * KvTile::kBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  // As forward/kernel.cuh names them, for a warp: 16 rows and a part of the keys.
  static constexpr int kRowBlocks = 1, kKeys = kTileKeys / kParts;
  static constexpr ForwardShape kShape = {16, kKeys, 1, kSplit.ctas, true};
  using QTile = SharedTile<16, kDim>;
  static_assert(kKeys % 16 == 0);
  static_assert(kWarps * 16 * kDim * 4 <= kStageBytes);  // all warps' O
};

// The same for a cache of elements of 8 bits, Cache, which travel through shared memory as they
// are: narrow_tile.cuh. Products are made in float16. Twice the keys of a tile are as many bytes.
constexpr SplitShape NarrowCacheShapeOf(int dim) {
  return dim == 64    ? SplitShape{128, 6, 2, 4}
         : dim == 128 ? SplitShape{128, 3, 2, 4}
         : dim == 192 ? SplitShape{128, 2, 2, 4}
                      : SplitShape{128, 2, 1, 4};
}
template <typename T_, int kDim_, int kRowBlocks_, typename Cache_>
struct NarrowTraits {
  using T = T_;
  using Cache = Cache_;
  static constexpr bool kWide = false, kCombines = true, kNarrow = true;
  static constexpr int kDim = kDim_, kTileBlocks = kRowBlocks_, kRows = kTileBlocks * 16;
  static constexpr SplitShape kSplit = NarrowCacheShapeOf(kDim);
  static constexpr int kWarps = kSplit.warps, kThreads = kWarps * 32, kComputing = kThreads;
  static constexpr int kLoaders = 0;
  static constexpr int kParts = kWarps / kTileBlocks;  // of a tile's keys
  static constexpr int kTileKeys = kSplit.keys, kStages = kSplit.stages;
  using KvTile = NarrowTile<kTileKeys, kDim>;
  using Keys = PagedKeys<NarrowTraits>;
  using Params = typename Keys::Params;
  static constexpr int kStageBytes = 2 * KvTile::kBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kRowBlocks = 1, kKeys = kTileKeys / kParts;
  static constexpr ForwardShape kShape = {16, kKeys, 1, kSplit.ctas, true};
  using QTile = SharedTile<16, kDim>;
  static_assert(kKeys % 16 == 0);
  static_assert(kWarps * 16 * kDim * 4 <= kStageBytes);  // all warps' O
};

// A thread among those who compute, which are all or the last of a CTA.
template <typename Traits>
struct OwnThread {
  unsigned thread;
  __device__ __forceinline__ int Lane() const { return thread % 32; }
  __device__ __forceinline__ int Warp() const { return thread / 32; }
  __device__ __forceinline__ int Part() const { return Warp() / Traits::kTileBlocks; }
  // Its two rows in the tile of rows.
  __device__ __forceinline__ int Row(int half) const {
    return Warp() % Traits::kTileBlocks * 16 + half * 8 + Lane() / 4;
  }
};
// Beside warps that load it is asked for again and again: what follows from it would otherwise be
// computed before the first tile is loaded, and take registers.
template <typename Traits>
__device__ __forceinline__ OwnThread<Traits> FindOwn() {
  const unsigned thread = threadIdx.x - Traits::kLoaders * 32;
  return {Traits::kLoaders > 0 ? static_cast<unsigned>(Opaque(static_cast<int>(thread))) : thread};
}

}  // namespace kvblock::generic
