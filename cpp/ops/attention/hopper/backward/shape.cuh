// What the roles of the Hopper backward kernel agree on: tiles, shared memory, barriers.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "device/warpgroup.cuh"
#include "device/wgmma.cuh"
#include "ops/attention/hopper/backward/dq_tile.cuh"
#include "ops/attention/hopper/backward/tiles.h"
#include "ops/attention/hopper/clusters.h"
#include "ops/attention/mask/tile_walk.cuh"

namespace kvblock::hopper {

// Hardware barriers: of both warpgroups that compute; of each with its warp that takes turns; of
// each by itself; of the warps that set up and begin.
constexpr int kWorkersMeet = 1, kTurnTakersMeet = 2, kWarpgroupMeets = 4, kLoaderBegins = 6;

// Rows of a box that a warpgroup stores.
constexpr int kStoredRows = 64;

struct BackwardMaps {
  CUtensorMap q, k, v, d_o, dk, dv;
};

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

// What the loader says of a step's tile of queries.
struct alignas(16) BackwardStep {
  int first, head;
  int flags;
  int end;                             // of its queries
  static constexpr int kMasked = 1;    // some pairs do not attend, or there is a bias
  static constexpr int kPartial = 2;   // the tile has rows that must not be read
  static constexpr int kEnd = 4;       // there is no tile
  static constexpr int kSegments = 8;  // masked, and of several segments
};

// What a CTA owns, and where its walk over the queries stands.
struct alignas(16) BackwardOwned {
  Sequence sequence;
  int first_key, kv_head;
  int begun;                   // steps that were started before the loader runs
  WalkState walk, fresh_walk;  // that of the next head begins as the first one's
};

template <int kDim_, int kValueDim_, bool kTall_ = false, bool kCapped_ = false>
struct BackwardShape {
  static constexpr bool kTall = kTall_, kCapped = kCapped_;  // kCapped: for a softcap, without bias
  static constexpr BackwardTiles kTiles = BackwardTilesOf(kDim_, kValueDim_, kTall);
  static constexpr int kQueries = kTiles.queries, kKeys = kTiles.keys, kStages = kTiles.stages;
  static constexpr int kDim = kDim_, kValueDim = kValueDim_;
  static constexpr int kWorkers = 2 * kWarpgroup, kThreads = kWarpgroup + kWorkers;
  static constexpr bool kWide = kKeys == 64;  // the warpgroups share the products, not the keys
  static constexpr bool kUneven = !kWide && kDim != kValueDim;  // uneven.cuh
  static constexpr bool kPaired = kWide && kDim == 256;         // pair.cuh
  // The CTAs of a cluster have neighbouring keys and go through the same queries.
  static constexpr int kCluster = kPaired ? 2 : 1, kClusterKeys = kKeys * kCluster;
  __device__ static constexpr int FirstOfCluster(int first_key) {
    return kCluster == 1 ? first_key : first_key & -kClusterKeys;
  }

  static constexpr BackwardRegisters kPlainRegisters =
                                         BackwardRegistersOf(kDim, kValueDim, kTall, true),
                                     kGeneralRegisters =
                                         BackwardRegistersOf(kDim, kValueDim, kTall, false);

  using KeyTile = SwizzledTile<kKeys, kDim>;
  using ValueTile = SwizzledTile<kKeys, kValueDim>;
  using PeerKeyTile = SwizzledTile<kKeys, kDim / 2>;
  using QueryTile = SwizzledTile<kQueries, kDim>;
  using GradTile = SwizzledTile<kQueries, kValueDim>;
  // Where each warpgroup has keys of its own, a row is a query: dQ then reads dS across.
  using ScoreTile =
      std::conditional_t<kWide, SwizzledTile<kKeys, kQueries>, SwizzledTile<kQueries, kKeys>>;

  // Where a chunk of K lies: uneven, the middle one is the last (uneven.cuh).
  __device__ static constexpr int KeyChunk(int chunk) {
    return kUneven && chunk > 0 ? 3 - chunk : chunk;
  }

  // Offsets in shared memory: dS of two steps, uneven of one, and, wide, P of one, not rounded. Of
  // a pair dS of one step, the other CTA's, and half of the columns of the other's K.
  static constexpr int kHeldSteps = 8;  // a step is looked at again during the next two
  static constexpr int kK = 0, kV = kK + KeyTile::kBytes, kQ = kV + ValueTile::kBytes;
  static constexpr int kDo = kQ + kStages * QueryTile::kBytes;
  static constexpr int kDs = kDo + kStages * GradTile::kBytes;
  static constexpr int kP = kDs + (kUneven ? 1 : 2) * ScoreTile::kBytes;
  static constexpr int kDqStages = kTiles.dq_stages;
  static constexpr int kDqColumns = kUneven ? kDim / 2 : 64;  // at most, of one warpgroup
  // Its part, as in dq_accum: these columns, or 64 of 128 queries.
  static constexpr int kDqBytes = (kTall ? kQueries : kDqRows) * kDqColumns * 4;
  static constexpr int kPeerDs = kDs + ScoreTile::kBytes, kPeerK = kP;
  static constexpr int kDq = kP + (kWide ? kKeys * kQueries * 4 : 0);
  static_assert(!kPaired || PeerKeyTile::kBytes == kDq - kPeerK);
  static constexpr int kLse = kDq + kDqStages * 2 * kDqBytes;
  static constexpr int kDelta = kLse + kStages * kQueries * 4;
  static constexpr int kSteps = kDelta + kStages * kQueries * 4;
  static constexpr int kOwned = kSteps + kHeldSteps * sizeof(BackwardStep);
  static constexpr int kBarriers = kOwned + sizeof(BackwardOwned);
  // Barriers: "full" when the copies have landed, "free" when both warpgroups have read; those of
  // dQ are of one warpgroup and the warp that adds (adder.cuh).
  static constexpr int kKFull = kBarriers, kVFull = kKFull + 8, kScoresReady = kVFull + 8;
  static constexpr int kPReady = kScoresReady + 16, kPFree = kPReady + 8, kMayAdd = kPFree + 8;
  static constexpr int kQFull = kMayAdd + 16, kQFree = kQFull + 8 * kStages;
  static constexpr int kDoFull = kQFree + 8 * kStages, kDoFree = kDoFull + 8 * kStages;
  static constexpr int kDqFull = kDoFree + 8 * kStages, kDqFree = kDqFull + 16 * kDqStages;
  static constexpr int kPeerKFull = kDqFree + 16 * kDqStages, kPeerDsFull = kPeerKFull + 8;
  static constexpr int kPeerDsFree = kPeerDsFull + 8, kPeerDsSent = kPeerDsFree + 8;
  static constexpr int kPeerQFree = kPeerDsSent + 8, kPeerDoFree = kPeerQFree + 8 * kStages;
  static constexpr int kBytes = kPeerDoFree + 8 * kStages;
  static_assert(kBytes <= kMostSharedBytes);
};

}  // namespace kvblock::hopper
