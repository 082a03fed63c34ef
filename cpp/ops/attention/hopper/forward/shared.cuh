// What the parts of Hopper's forward kernel (kernel.cuh) share: sizes, parameters, and the plan
// and the tiles in shared memory.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "device/warpgroup.cuh"
#include "device/wgmma.cuh"
#include "device/widen.cuh"
#include "ops/attention/contract/params.cuh"
#include "ops/attention/hopper/forward/launcher.h"
#include "ops/attention/hopper/forward/narrow_params.cuh"
#include "ops/attention/hopper/forward/paged_params.cuh"
#include "ops/attention/hopper/forward/tiles.h"
#include "ops/attention/mask/dropout.cuh"
#include "ops/attention/mask/tile_walk.cuh"
#include "ops/attention/schedule/rounds.cuh"
#include "ops/attention/schedule/stage_count.cuh"

namespace kvblock::hopper {

constexpr int kConsumerRows = 64;  // query rows of a consumer

// A query tile. The CTAs of a cluster have the same one of several heads, or neighbouring ones, of
// which the last may lie past the end; they visit the KV tiles that any of them sees.
struct Item {
  Sequence sequence;
  int head, first;
  int q_row, kv_row, kv_head, batch;       // where its rows begin in the tensor maps
  enum : int { kEnd, kEmpty, kTiles } is;  // no more items; without KV tiles; with some
};

// The same where the rows of a tile are those of several heads that share a key head: row r is
// query first + r / pack of head `head` + r % pack.
struct PagedItem : Item {
  int rows;                // of the tile, that there are
  int key_begin, key_end;  // what some of them see lies between these
  // Where keys are shared out (pieces.cuh): how many items have the tile, the place of what the
  // first one comes to, and which of them this is.
  int pieces, first_slot, piece;
};

// The same with its key of dropout.
struct DroppedItem : Item {
  uint2 key;
};
struct DroppedForwardParams : ForwardParams {
  Dropout dropout;
};

template <typename T_, int kDim_, int kValueDim_, ForwardKind kKind_>
struct ForwardTraits {
  using T = T_;
  static constexpr int kQueryDim = kDim_, kValueDim = kValueDim_;
  static constexpr ForwardKind kKind = kKind_;
  // Elements of 8 bits: V comes transposed, a row for each of its columns, since products of 8 bits
  // want both operands to lie across; O is in 16 bits.
  static constexpr bool kNarrow = std::is_same_v<T, E4m3> || std::is_same_v<T, Int8>;
  // Queries and keys are integers, and so are scores (narrow_rows.cuh); V is in e4m3.
  static constexpr bool kIntegers = std::is_same_v<T, Int8>;
  using Out = std::conditional_t<kNarrow, __nv_bfloat16, T>;
  static constexpr int kElementBytes = kNarrow ? 1 : 2;
  static constexpr ForwardTiles kTiles =
      kNarrow ? NarrowTilesOf(kDim_, kKind_) : ForwardTilesOf(kDim_, kValueDim_, kKind_);
  static constexpr int kConsumers = kTiles.consumers;
  static constexpr int kStages = kNarrow ? kNarrowKvStages : kKvStages;
  static constexpr int kQueryStages = kTiles.query_stages;
  static constexpr int kQueries = kConsumers * kConsumerRows, kKeys = kTiles.keys;
  static constexpr int kCluster = kTiles.cluster;
  static constexpr int kClusterQueries = kQueries * kCluster, kLoadedKeys = kKeys / kCluster;
  // Whole warps load K and V from blocks; four are one more warpgroup.
  static constexpr int kLoadWarps = kTiles.load_warps, kLoadGroups = kLoadWarps / 4;
  static constexpr int kThreads = (kConsumers + 1 + kLoadGroups) * kWarpgroup;
  // What a thread begins with, all warpgroups' together. Who takes more waits forever.
  static constexpr int kRegisters = (1 << 16) / kThreads / 8 * 8 * (kThreads / kWarpgroup);
  static_assert(kTiles.producer_registers + kConsumers * kTiles.consumer_registers +
                    kLoadGroups * kTiles.loader_registers <=
                kRegisters);
  static constexpr int ChunksOf(int columns, int bytes) {
    return (columns * bytes + kChunkRowBytes - 1) / kChunkRowBytes;
  }
  static constexpr int kQueryChunks = ChunksOf(kQueryDim, kElementBytes);
  static constexpr int kOutputChunks = ChunksOf(kValueDim, 2);
  // A tile of V as it lies in shared memory. Of 8 bits it has rows of ones behind V's columns, so
  // that the product has the sums of the probabilities as they were rounded.
  static constexpr int kOnes = kNarrow ? 8 : 0;
  static constexpr int kValueRows = kNarrow ? kValueDim + kOnes : kKeys;
  static constexpr int kLoadedValueRows = (kValueRows - kOnes) / kCluster;
  static constexpr int kValueChunks = ChunksOf(kNarrow ? kKeys : kValueDim, kElementBytes);
  static constexpr int kQBytes = kQueries * kQueryChunks * kChunkRowBytes;
  static constexpr int kKBytes = kKeys * kQueryChunks * kChunkRowBytes;
  static constexpr int kVBytes = kValueRows * kValueChunks * kChunkRowBytes;
  static constexpr int kProductSteps = kKeys * kElementBytes / 32;  // of P V
  static constexpr bool kJoins = kKind == ForwardKind::kJoined;
  // O leaves through shared memory where there is room for it, which is beside two places for Q.
  static constexpr bool kStagesOutput = kQueryStages > 1;
  static_assert(kStagesOutput || !kJoins);
  static constexpr int kOBytes =
      kStagesOutput ? kConsumerRows * kOutputChunks * kChunkRowBytes : 16;
  static constexpr bool kCapped =
      kKind == ForwardKind::kCapped || kKind == ForwardKind::kPagedCapped;
  static constexpr bool kHasBases = kKind == ForwardKind::kGeneral;  // with a bias
  static constexpr bool kPaged = IsPaged(kKind);
  static constexpr bool kSharesKeys = kPaged && !kNarrow;  // of some tiles (pieces.cuh)
  static constexpr bool kDrops = kKind == ForwardKind::kDropped;
  // A batch of which every row takes part, and only the band masks.
  static constexpr bool kDense = kKind == ForwardKind::kBand || kKind == ForwardKind::kWide;
  static constexpr bool kHasLists = kKind == ForwardKind::kGeneral || kKind == ForwardKind::kLists;
  // A listed tile may be a step.
  static constexpr bool kPlansEntries = kKind == ForwardKind::kLists && kKeys == 128;
  using Walk = TileWalk<Along::kKeys, kKeys,
                        kDense || kPaged ? Walks::kBand
                        : kHasLists      ? Walks::kAll
                                         : Walks::kSegments>;
  // Row by row, the warps take turns at four rows each. A lane looks up one of a turn's, of eight
  // turns, and one of the next eight.
  static constexpr int kTurnKeys = std::max(kLoadWarps, 1) * 4, kTurns = kKeys / kTurnKeys;
  static constexpr int kLaneRows = (kTurns + 7) / 8;
  // Where boxes of blocks have fewer rows, these are copied one by one; a multiple of 8, which
  // swizzled boxes are.
  static constexpr int kLeastBoxRows = 8;
  static_assert(!kPaged || (kCluster == 1 && kLeastBoxRows % 8 == 0 &&
                            kTurns * kTurnKeys == kKeys && kTurnKeys % 8 == 0));
  static_assert(!kNarrow || kKind == ForwardKind::kPlain || kKind == ForwardKind::kBand ||
                kKind == ForwardKind::kPaged);
  static_assert(!kNarrow || !kPaged || (kQueryChunks == 1 && kValueChunks == 1));
  using Params = std::conditional_t<
      kPaged, std::conditional_t<kNarrow, NarrowPagedForwardParams, PagedForwardParams>,
      std::conditional_t<kNarrow, NarrowForwardParams,
                         std::conditional_t<kDrops, DroppedForwardParams, ForwardParams>>>;
  using Item =
      std::conditional_t<kPaged, PagedItem, std::conditional_t<kDrops, DroppedItem, hopper::Item>>;
  // As mask/forward_scores.cuh names them, for a warp's 16 rows.
  static constexpr int kRowBlocks = 1, kDim = kValueDim;
  static_assert(kLoadedKeys % 8 == 0 && kLoadedValueRows % 8 == 0);
};

// A step of the plan: a KV tile, or an item that has none, or the end.
struct alignas(16) Step {
  int first;
  int end;  // keys from here on are not to be seen
  int flags;
  int item;  // a place in `items`
  enum : int {
    kMasked = 1,     // a KV tile with hidden keys
    kLast = 2,       // the last of its item
    kDirty = 4,      // rows of V from `end` on hold what must not be seen
    kStarts = 8,     // the first of its item
    kSegments = 16,  // masked, and of several segments
    kHoles = 32,     // masked, and some of the keys that rows see are in no block
  };
};

// Steps that the planner is ahead of the consumers, and items, of which four more may be in use:
// consumers write an item after they have left the steps of the next, and the writer follows.
constexpr int kSteps = 8, kItems = 16;

// The rows of a tile that one of the loading warps looks up: number i of a lane. Eight lanes have
// the same place in a turn, one for each turn. It may lie beyond the tile.
template <typename Traits>
__device__ __forceinline__ int LoadedRow(int warp, int lane, int i) {
  return (i * 8 + lane % 8) * Traits::kTurnKeys + warp * 4 + lane / 8;
}

// What only paged kernels have. Of the keys of each step a bit, for the lanes of LoadedRow: 1
// where one that rows see is in no block. Nobody reads those of a tile without kHoles.
template <typename Traits, bool kPaged>
struct PagedState {};
template <typename Traits>
struct PagedState<Traits, true> {
  uint32_t holes[kSteps][Traits::kLoadWarps][Traits::kLaneRows];
  // Of each consumer: whether it left the last piece of its rows, and whether the writer is to
  // write what is in its place.
  bool last[Traits::kConsumers], writes[Traits::kConsumers];
};

// What only joined kernels have: which items are planned, the lse that is joined, of each
// consumer's rows, and the tiles of a pair.
template <bool kJoins, int kConsumers>
struct JoinedState {};
template <int kConsumers>
struct JoinedState<true, kConsumers> {
  uint64_t item_full[kItems];
  float lse[kConsumers][kConsumerRows];
  int tiles;
};

// What only kernels of 8 bits have: of each step what a product of a query and a key is to be
// multiplied by to become an exponent of 2.
template <bool kNarrow>
struct NarrowState {};
template <>
struct NarrowState<true> {
  float to_log2[kSteps];
};

template <typename Traits>
struct ForwardShared {
  alignas(1024) char q[Traits::kQueryStages][Traits::kQBytes];
  alignas(1024) char k[Traits::kStages][Traits::kKBytes];
  alignas(1024) char v[Traits::kStages][Traits::kVBytes];
  alignas(1024) char o[Traits::kConsumers][Traits::kOBytes];
  Step steps[kSteps];
  typename Traits::Item items[kItems];
  typename Traits::Walk::State walk;
  uint64_t step_full[kSteps], step_empty[kSteps];
  uint64_t q_full[Traits::kQueryStages], q_empty[Traits::kQueryStages];
  uint64_t k_full[Traits::kStages], k_empty[Traits::kStages];
  uint64_t v_full[Traits::kStages], v_empty[Traits::kStages];
  uint64_t o_full[Traits::kConsumers], o_empty[Traits::kConsumers];
  PagedState<Traits, Traits::kPaged> paged;
  JoinedState<Traits::kJoins, Traits::kConsumers> joined;
  NarrowState<Traits::kNarrow> narrow;
};

struct ForwardMaps {
  CUtensorMap q, k, v, o;
};

// Whether K and V come by bulk copies, and who arrives when a tile, and when Q, is there.
template <typename Traits>
__device__ __forceinline__ bool LoadsBoxes(const typename Traits::Params& p) {
  if constexpr (Traits::kPaged) return p.box_rows > 0;
  return true;
}
template <typename Traits>
__device__ __forceinline__ int LoadArrivals(const typename Traits::Params& p) {
  constexpr int kWarps = Traits::kPaged ? Traits::kLoadWarps : 1;
  return LoadsBoxes<Traits>(p) ? kWarps : kWarps * 32 + kWarps;
}
// Of V^T one thread loads a tile at a time.
template <typename Traits>
__device__ __forceinline__ int ValueArrivals(const typename Traits::Params& p) {
  if constexpr (Traits::kNarrow && Traits::kPaged) return 1;
  return LoadArrivals<Traits>(p);
}
template <typename Traits>
constexpr int kQueryArrivals = Traits::kPaged ? Traits::kLoadWarps : 1;
// The threads that say when they have left a step: those of consumers, who come last, and of warps
// that load from pages, which all read it.
template <typename Traits>
constexpr int kStepReaders =
    Traits::kConsumers * kWarpgroup + (Traits::kPaged ? Traits::kLoadWarps * 32 : 0);

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace kvblock::hopper
