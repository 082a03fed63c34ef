// The tiles of the backward kernel over keys, and what lies where in its shared memory.
#pragma once

#include <cstdint>

#include "ops/attention/generic/tile.cuh"
#include "ops/attention/mask/tile_walk.cuh"

namespace kvblock::generic {

// With kStages these fit into the 163 KiB of sm_80. A warp's part of dQ has kDqRows rows.
template <int kDim, int kElementBytes>
struct BackwardKvTiling;
template <>
struct BackwardKvTiling<64, 2> {
  static constexpr int kQueries = 128, kKeys = 128, kStages = 2, kDqRows = 32;
};
template <>
struct BackwardKvTiling<128, 2> {
  static constexpr int kQueries = 64, kKeys = 128, kStages = 2, kDqRows = 32;
};
template <>
struct BackwardKvTiling<192, 2> {
  static constexpr int kQueries = 64, kKeys = 64, kStages = 2, kDqRows = 32;
};
template <>
struct BackwardKvTiling<256, 2> {
  static constexpr int kQueries = 64, kKeys = 64, kStages = 1, kDqRows = 32;
};
template <>
struct BackwardKvTiling<64, 4> {
  static constexpr int kQueries = 64, kKeys = 128, kStages = 1, kDqRows = 32;
};
template <>
struct BackwardKvTiling<128, 4> {
  static constexpr int kQueries = 64, kKeys = 64, kStages = 1, kDqRows = 32;
};

// What is seldom needed waits in shared memory; the sums need the registers.
struct alignas(16) BackwardKeys {  // of a CTA
  Sequence sequence;
  int first, head;  // whose keys it has
  // Row 0 of the sequence, head 0.
  const char *q, *d_o;
  const float *lse, *delta;
  float* dq;          // the block of rows that it lies in, ...
  int dq_row;         // ... and where in the block
  int64_t dq_stride;  // floats from head to head
};
struct alignas(16) BackwardWalk {  // of a warp; all warps of a CTA walk alike
  WalkState state;
  struct Tile {
    int head, first;  // the queries
    bool visible;     // all of them see all our keys
  } tiles[2];         // by the step's parity
};

// How a launch uses the shared memory that the GPU has.
struct BackwardKvPlan {
  int32_t stages;  // of Q and dO: 1 or 2
  int32_t bytes;
};

template <typename T, int kDim_>
struct BackwardKvShape : BackwardKvTiling<kDim_, sizeof(T)> {
  using Tiling = BackwardKvTiling<kDim_, sizeof(T)>;
  using Tiling::kDqRows, Tiling::kKeys, Tiling::kQueries, Tiling::kStages;
  static constexpr int kDim = kDim_, kWarps = 8, kThreads = kWarps * 32;
  static constexpr int kPairs = kWarps / 2, kPairKeys = kKeys / kPairs;

  using KeyTile = TileOf<T, kKeys, kDim>;
  using QueryTile = TileOf<T, kQueries, kDim>;
  using ScoreTile = TileOf<T, kQueries, kKeys>;

  // Offsets in shared memory. A stage is Q, then dO.
  static constexpr int kK = 0, kV = kK + KeyTile::kBytes, kP = kV + KeyTile::kBytes;
  static constexpr int kDs = kP + ScoreTile::kBytes, kLse = kDs + ScoreTile::kBytes;
  static constexpr int kDelta = kLse + 2 * kQueries * 4, kLanded = kDelta + 2 * kQueries * 4;
  static constexpr int kDsReady = kLanded + 16, kDone = kDsReady + 8;
  static constexpr int kKeysOf = kDone + 8, kWalk = kKeysOf + sizeof(BackwardKeys);
  static constexpr int kStage = (kWalk + kWarps * sizeof(BackwardWalk) + 127) / 128 * 128;
  static constexpr int kStageBytes = 2 * QueryTile::kBytes;
  static_assert(kKeysOf % 16 == 0 && kStage + kStages * kStageBytes <= 163 * 1024);

  // Blocks of 16 x 8 accumulators in one warp's part of a product.
  static constexpr int kScoreM = kQueries / 2 / 16, kScoreN = kPairKeys / 8;
  static constexpr int kKvM = kPairKeys / 16, kKvN = kDim / 2 / 8;
  static constexpr int kDqWarpsDown = kQueries / kDqRows, kDqWarpsAcross = kWarps / kDqWarpsDown;
  static constexpr int kDqM = kDqRows / 16, kDqN = kDim / kDqWarpsAcross / 8;

  // A second stage, where sm_80 has no room for it but the GPU at hand has.
  static BackwardKvPlan Plan(int shared_bytes) {
    constexpr int kMost = kStage + 2 * kStageBytes;
    if (kStages == 2 || kMost <= shared_bytes) return {2, kMost};
    return {1, kStage + kStageBytes};
  }
};

}  // namespace kvblock::generic
