// The tiles of the Hopper backward kernel, for a pair of padded head dims, and how its two
// warpgroups share the work.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/warpgroup.cuh"
#include "device/wgmma.cuh"
#include "ops/attention/hopper/backward/dq_tile.cuh"
#include "ops/attention/hopper/backward/tiles.h"
#include "ops/attention/mask/dropout.cuh"

namespace kvblock::hopper {

// Rows of a box that a warpgroup stores.
constexpr int kStoredRows = 64;

// A tile of 16-bit elements as bulk copies write it (wgmma.cuh).
template <int kRows_, int kDim_>
struct SwizzledTile {
  static constexpr int kRows = kRows_, kDim = kDim_;
  static constexpr int kChunks = (kDim + kChunkColumns - 1) / kChunkColumns;
  static constexpr int kChunkBytes = kRows * kChunkRowBytes, kBytes = kChunks * kChunkBytes;

  __device__ static __forceinline__ uint32_t Offset(int row, int column) {
    return SwizzledOffset(kRows, row, column);
  }
};

// kTall: 80 queries a step (tiles.h). kCapped: for a softcap, without bias. kPartial: for tile
// lists with partial tiles, whose bits would cost the others registers. kListed: for tile lists
// alone, without a softcap and a bias also of whole tiles. kDrops: for dropout.
template <int kDim_, int kValueDim_, bool kTall_ = false, bool kCapped_ = false,
          bool kPartial_ = false, bool kListed_ = kPartial_, bool kDrops_ = false>
struct BackwardShape {
  static constexpr bool kTall = kTall_, kCapped = kCapped_, kPartial = kPartial_;
  static constexpr bool kListed = kListed_, kDrops = kDrops_;
  static_assert(!kDrops || !kTall);  // a tile begins with a block of 16 queries
  using Params = std::conditional_t<kDrops, DroppingParams, AttentionParams>;
  static constexpr BackwardTiles kTiles = BackwardTilesOf(kDim_, kValueDim_, kTall);
  static constexpr int kQueries = kTiles.queries, kKeys = kTiles.keys, kStages = kTiles.stages;
  static constexpr int kDim = kDim_, kValueDim = kValueDim_;
  static constexpr int kWorkers = 2 * kWarpgroup, kThreads = kWarpgroup + kWorkers;

  // What the warpgroups share: the keys, 64 each, or the products. Of the first, whether S and dP
  // are computed one after the other (split_keys_sequential.cuh); of the second, whether clusters
  // of two CTAs share dQ (split_products_cluster.cuh).
  static constexpr bool kSplitsProducts = kKeys == 64;
  static constexpr bool kSequential = !kSplitsProducts && kDim != kValueDim;
  static constexpr bool kClustered = kSplitsProducts && kDim == 256;
  // The CTAs of a cluster have neighbouring keys and go through the same queries.
  static constexpr int kCluster = kClustered ? 2 : 1, kClusterKeys = kKeys * kCluster;
  __device__ static constexpr int FirstOfCluster(int first_key) {
    return kCluster == 1 ? first_key : first_key & -kClusterKeys;
  }

  static constexpr BackwardRegisters kPlainRegisters =
      BackwardRegistersOf(kDim, kValueDim, kTall, !kDrops, kListed && !kPartial);
  static constexpr BackwardRegisters kGeneralRegisters =
      BackwardRegistersOf(kDim, kValueDim, kTall, false, false);

  using KeyTile = SwizzledTile<kKeys, kDim>;
  using ValueTile = SwizzledTile<kKeys, kValueDim>;
  using PeerKeyTile = SwizzledTile<kKeys, kDim / 2>;
  using QueryTile = SwizzledTile<kQueries, kDim>;
  using GradTile = SwizzledTile<kQueries, kValueDim>;
  // Where each warpgroup has keys of its own, a row is a query: dQ then reads dS across.
  using ScoreTile = std::conditional_t<kSplitsProducts, SwizzledTile<kKeys, kQueries>,
                                       SwizzledTile<kQueries, kKeys>>;
  static constexpr int kScoreTiles = kSequential ? 1 : 2;

  // Where a chunk of K lies: sequential, the middle one is the last (split_keys_sequential.cuh).
  __device__ static constexpr int KeyChunk(int chunk) {
    return kSequential && chunk > 0 ? 3 - chunk : chunk;
  }

  // One warpgroup's part of dQ, as in dq_accum: at most these columns, or 64 of 128 queries.
  static constexpr int kDqColumns = kSequential ? kDim / 2 : 64;
  static constexpr int kDqBytes = (kTall ? kQueries : kDqRows) * kDqColumns * 4;
  static constexpr int kDqStages = kTiles.dq_stages, kDqParts = 2 * kDqStages;
};

}  // namespace kvblock::hopper
