// What the parts of Hopper's kernel for latent caches (kernel.cuh) share: sizes, and what lies in
// shared memory.
#pragma once

#include <cstdint>

#include "device/cluster.cuh"
#include "device/swizzle.cuh"
#include "device/warpgroup.cuh"
#include "ops/attention/hopper/forward/shared.cuh"
#include "ops/attention/hopper/latent/launcher.h"
#include "ops/attention/mask/sequence.cuh"
#include "ops/attention/schedule/pages.cuh"
#include "ops/attention/schedule/shares.cuh"

namespace kvblock::hopper {

// Chunks of a tile that are loaded, waited for and left together: two of columns that are values,
// and the last one, which is none.
constexpr int kChunkGroups = 5, kLastGroup = 4;
__host__ __device__ constexpr int ChunksOf(int group) { return group == kLastGroup ? 1 : 2; }

// kCluster: CTAs that compute a unit together, 64 of its rows each, and load its keys for each
// other.
template <typename T_, int kKeyDim, int kAllValueDim, int kCluster_>
struct LatentTraits {
  using T = T_;
  using Params = PagedParams;
  static constexpr int kCluster = kCluster_;
  static constexpr int kRows = 64, kKeys = 64, kStages = 2;
  static constexpr int kKeyChunks = kKeyDim / 64, kValueChunks = kAllValueDim / 64;  // of columns
  static constexpr int kConsumers = 2, kConsumerThreads = kConsumers * kWarpgroup;
  static constexpr int kThreads = kConsumerThreads + kWarpgroup;
  static constexpr int kLoaderRegisters = 56, kConsumerRegisters = 224;
  static constexpr int kChunkBytes = kKeys * kChunkRowBytes, kTileBytes = kKeyChunks * kChunkBytes;
  // As forward/rows.cuh names them, for a consumer's rows and its half of O's columns.
  static constexpr int kRowBlocks = 1, kValueDim = kAllValueDim / kConsumers, kDim = kValueDim;
  static constexpr bool kNarrow = false;
  static constexpr int kOnes = 0, kProductSteps = kKeys / 16;
  using OwnLine = Line<kKeys, kThreads, Params>;
  static_assert(kRows * kChunkRowBytes == kChunkBytes);  // Q's chunks are as large
  static_assert(kCluster == 1 || kCluster == 2);
  static_assert(kKeyDim == 9 * 64 && kAllValueDim == 8 * 64);  // groups of chunks are of these
};

// The order in which groups of a tile are loaded and multiplied: about that in which those of the
// tile before in the same place are left. Consumer 1 has multiplied its half of its own tile when
// the other begins. Alone, both work on tiles of consumer 0 at the same time, and the last columns
// are left when the other takes P, for which it has waited for a whole tile of its own.
//
// In a cluster tiles come later, since two CTAs must have left their place. Of consumer 0's tile
// its own half is first, then what is left with P, then the half of consumer 1, which multiplies
// only once P is shown. The last columns are in front of group 3: they are one chunk, which one of
// the CTAs loads, and so a CTA may have multiplied them while the other one still waits for their
// place. It cannot have all of group 3, of which the other loads a half after that wait, by the
// same warp, and does not leave the last columns before: so nobody arrives at a barrier for a tile
// while it counts those of the one before.
template <typename Traits>
__host__ __device__ constexpr int GroupAt(int owner, int i) {
  constexpr int kAlone[2][kChunkGroups] = {{0, 2, 1, 3, 4}, {2, 3, 0, 1, 4}};
  constexpr int kTogether[2][kChunkGroups] = {{0, 1, 4, 2, 3}, {2, 0, 1, 4, 3}};
  return Traits::kCluster == 1 ? kAlone[owner][i] : kTogether[owner][i];
}

// This CTA's place in its cluster, and which of the line's shares is the cluster's.
template <typename Traits>
__device__ __forceinline__ int RankOf() {
  return Traits::kCluster > 1 ? ClusterRank() : 0;
}
template <typename Traits>
__device__ __forceinline__ int NumberOf() {
  return static_cast<int>(blockIdx.x) / Traits::kCluster;
}

// Packed rows of a unit that a CTA computes.
template <typename Traits>
__device__ __forceinline__ int RowsOf(const typename Traits::Params& p) {
  return Traits::kCluster > 1 ? Traits::kRows : p.rows;
}
// Where it is told that this CTA's rows of a piece are there.
template <typename Traits>
__device__ __forceinline__ int32_t* PieceThere(const typename Traits::Params& p, unsigned slot) {
  return p.piece_there + slot * Traits::kCluster + RankOf<Traits>();
}

// What a share has of a unit.
struct LatentPiece {
  Sequence sequence;
  int first_row;         // this CTA's, of the sequence's packed rows; there may be none from it on
  int first_key, tiles;  // where its first tile begins; 0 tiles: there are no more pieces
  int key_begin, key_end;  // what some row of the unit sees lies between these
  unsigned slot;
  bool whole;  // the unit
};
constexpr int kPieces = 4;

template <typename Traits>
struct LatentShared {
  alignas(1024) char q[Traits::kTileBytes];
  alignas(1024) char tiles[Traits::kStages][Traits::kTileBytes];
  LatentPiece pieces[kPieces];
  float references[Traits::kConsumers][Traits::kRows];  // of the owner's tile
  float sums[2][Traits::kConsumers][Traits::kRows];     // by pieces in turn
  // A bit for each key of a tile: 1 where one that rows see is in no block.
  uint32_t holes[Traits::kStages][Traits::kKeys / 32];
  uint64_t full[Traits::kStages][kChunkGroups], empty[Traits::kStages][kChunkGroups];
  uint64_t q_full, q_empty, piece_full[kPieces], piece_empty[kPieces];
  uint64_t p_full[Traits::kConsumers];  // P of the owner's tile, and its references
  uint64_t both_meet;
};

// Arrivals that leave a group of a tile: of the warps of a consumer, in each CTA that the group's
// copies write to. Where a CTA is alone, threads that have read P do so for themselves.
template <typename Traits>
__host__ __device__ constexpr int LeavesOf(int group) {
  const bool threads = Traits::kCluster == 1 && group == kLastGroup;
  return (threads ? kWarpgroup : kWarpgroup / 32) * Traits::kCluster;
}

// Hardware barriers of the consumers, in twos, one for each.
enum LatentBarrier {
  kScoresDone = 1,
  kRowsCleared = 3,
};

}  // namespace kvblock::hopper
