// The tiles of the generic forward kernel, and what lies where in its shared memory.
#pragma once

#include "ops/attention/generic/fragments.cuh"
#include "ops/attention/generic/tile.cuh"

namespace kvblock::generic {

// The tile sizes of each padded head dim. At most 96 KiB of shared memory, so that consumer GPUs
// (99 KiB) run the same instances. docs/attention_log.md has what else was measured.
struct ForwardShape {
  int queries, keys, warps;
  int ctas;           // on one multiprocessor; fixes the registers a thread may have
  bool hold_queries;  // Q's fragments stay in registers, and a KV stage takes Q's place
  int stages;         // with one, K and V each arrive while the other is needed
};
template <int kElementBytes>
constexpr ForwardShape ForwardShapeOf(int dim) {
  if (kElementBytes == 4) {
    return dim == 64    ? ForwardShape{128, 64, 4, 2, false, 2}
           : dim == 128 ? ForwardShape{128, 32, 4, 2, false, 1}
                        : ForwardShape{64, 16, 4, 2, false, 1};
  }
  return dim == 64    ? ForwardShape{128, 128, 4, 2, false, 2}
         : dim == 128 ? ForwardShape{128, 64, 4, 2, false, 2}
         : dim == 192 ? ForwardShape{128, 64, 8, 1, true, 2}
                      : ForwardShape{64, 32, 4, 2, true, 2};
}

// Blocks of columns of V that are read and multiplied together, and, where sums are apart, the
// steps of keys that are summed up (fragments.cuh): as many as spill nothing.
template <typename T, int kDim>
constexpr int kColumnBlocks = !kIsFloat32<T> || (kSumsApart<T> && kDim <= 128) ? 2 : 4;
template <typename T, int kDim>
constexpr int kStepsTogether = kSumsApart<T> && kDim == 128 ? 2 : 1;

template <typename T_, int kDim_>
struct ForwardTraits {
  using T = T_;
  static constexpr int kDim = kDim_;
  static constexpr ForwardShape kShape = ForwardShapeOf<sizeof(T)>(kDim);
  static constexpr int kQueries = kShape.queries, kKeys = kShape.keys;
  static constexpr int kThreads = kShape.warps * 32;
  static constexpr int kRowBlocks = kQueries / kShape.warps / 16;
  using QTile = TileOf<T, kQueries, kDim>;
  using KvTile = TileOf<T, kKeys, kDim>;

  // Where the stages of K and V begin; Q begins at 0.
  static constexpr int kStageBytes = 2 * KvTile::kBytes;
  static constexpr int kHeldBytes = QTile::kBytes > kStageBytes ? QTile::kBytes : kStageBytes;
  static constexpr int kStage0 = kShape.hold_queries ? kHeldBytes : QTile::kBytes;
  static constexpr int kStage1 = kShape.hold_queries ? 0 : kStage0 + kStageBytes;
  static constexpr int kSharedBytes =
      kStageBytes + (kStage1 == 0 || kShape.stages == 1 ? kStage0 : kStage1);
};

}  // namespace kvblock::generic
