// The planner of Hopper's forward kernel (kernel.cuh), a warp: which query tiles are this CTA's,
// and which KV tiles they see.
#pragma once

#include <cstdint>

#include "device/cluster.cuh"
#include "device/grid_size.cuh"
#include "device/mbarrier.cuh"
#include "device/opaque.cuh"
#include "ops/attention/hopper/forward/shared.cuh"
#include "ops/attention/schedule/long_tiles.cuh"

namespace kvblock::hopper {

template <typename Traits>
class Planner {
 public:
  __device__ __forceinline__ Planner(const typename Traits::Params& p,
                                     ForwardShared<Traits>& shared)
      : p_(p), shared_(shared), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void Run() {
    if constexpr (Traits::kPaged) {
      PlanLongTiles();
    } else {
      PlanTiles();
    }
    if (lane_ == 0) Announce(Item::kEnd);
    Prepare({0, 0, 0, item_});
    Publish(0);
  }

 private:
  using Walk = typename Traits::Walk;
  using Item = typename Traits::Item;
  static constexpr bool kDense = Traits::kDense;

  __device__ __forceinline__ void PlanTiles() {
    const bool counted = Traits::kCluster == 1 && p_.counter != nullptr;
    unsigned index = blockIdx.x;
    // Of a packed joined call, queries without keys have no tiles: what they hold stays as it is.
    if constexpr (Traits::kJoins) {
      const int seen = p_.cu_q == nullptr
                           ? p_.tiles
                           : CountTiles<Along::kQueries, Traits::kClusterQueries, true>(p_);
      if (lane_ == 0) shared_.joined.tiles = seen;
      __syncwarp();
    }
    for (int round = 0;; ++round) {
      const int tiles = Tiles();
      const int grid = GridSize() / Traits::kCluster;
      const int cta = Opaque(static_cast<int>(blockIdx.x)) / Traits::kCluster;
      const Assignment at =
          counted ? AssignInOrder(p_, tiles, index) : AssignInRounds(p_, tiles, round, cta, grid);
      if (at.is == Assignment::kEnd) break;
      const unsigned count = at.is == Assignment::kTile ? PlanTile(at, counted) : 0;
      if (Traits::kCluster == 1) {
        index = GridSize() + __shfl_sync(~0u, count, 0);
      }
    }
  }

  // Of a pair.
  __device__ __forceinline__ int Tiles() const {
    if constexpr (Traits::kJoins) return shared_.joined.tiles;
    return Opaque(p_.tiles);
  }

  // In the order of rounds.cuh, of tiles that only the device can count.
  __device__ __forceinline__ void PlanLongTiles() {
    LongTiles long_tiles(p_, p_.queries);
    const unsigned tiles = long_tiles.Count(), units = p_.num_pairs;
    unsigned pieces = 1;
    if constexpr (Traits::kSharesKeys) {
      pieces = long_tiles.Pieces<Traits::kKeys>(tiles * units, p_.most_pieces);
    }
    const bool counted = p_.counter != nullptr;
    // A CTA that begins late must not find the first tiles waiting for it.
    const unsigned before = p_.follows ? 0 : GridSize();
    unsigned index = p_.follows ? __shfl_sync(~0u, Count(), 0) : blockIdx.x;
    while (index < tiles * units * pieces) {
      const unsigned item = index / pieces;
      const unsigned section = item / (p_.section_pairs * tiles) * p_.section_pairs;
      const unsigned in_section = item - section * tiles;
      const unsigned side = min(static_cast<unsigned>(p_.section_pairs), units - section);
      const unsigned nth = in_section / side;
      int member, tile;
      long_tiles.Find(static_cast<int>(nth), &member, &tile);
      if constexpr (Traits::kSharesKeys) {
        if (lane_ == 0) {
          Item& own = shared_.items[item_];
          own.pieces = static_cast<int>(pieces);
          own.first_slot = static_cast<int>(item * pieces);
          own.piece = static_cast<int>(index - item * pieces);
        }
      }
      const unsigned count =
          PlanLongTile(static_cast<int>(section + in_section - nth * side), member, tile, counted);
      index = counted ? before + __shfl_sync(~0u, count, 0) : index + GridSize();
    }
  }
  __device__ __forceinline__ unsigned PlanLongTile(int unit, int member, int tile, bool counted) {
    Item& item = shared_.items[item_];
    const Sequence found = MemberSequence(p_, member);
    const int first = tile * p_.queries, end = min(first + p_.queries, found.q_len);
    if (lane_ == 0) {
      const int pack = static_cast<int>(p_.by_pack.d);
      item.sequence = found;
      item.first = first;
      item.head = unit * pack;
      item.kv_head = unit / p_.kv_units;
      item.q_row = static_cast<int>(found.q_row) + first;
      item.kv_row = item.batch = 0;
      item.rows = (end - first) * pack;
      found.VisibleKeys(first, end, &item.key_begin, &item.key_end);
    }
    __syncwarp();
    return PlanSteps(first, end, counted);
  }
  // Leaves the walk those of its KV tiles that are the item's, which is a piece. Where there are
  // too few for another piece, the item is none, and has 0 pieces.
  __device__ __forceinline__ void TakePart(Item* item) {
    typename Walk::State& walk = shared_.walk;
    const int from = walk.first / Traits::kKeys + 1;
    const int tiles = max((walk.end + Traits::kKeys - 1) / Traits::kKeys - from, 0);
    const int number = item->piece, pieces = min(item->pieces, max(tiles, 1));
    item->pieces = number < pieces ? pieces : 0;
    if (pieces == 1) return;
    walk.first = (from + tiles * number / pieces - 1) * Traits::kKeys;
    walk.end = min(walk.end, (from + tiles * (number + 1) / pieces) * Traits::kKeys);
  }

  // How many tiles were counted before this one; in lane 0.
  __device__ __forceinline__ unsigned Count() {
    if (lane_ != 0) return 0;
    return atomicAdd(p_.counter, 1);
  }

  // Returns how many tiles were counted before, in lane 0. It asks as late as possible, or the next
  // tile would be this CTA's long before it is done with this one; then others that are done
  // earlier would not have it, and the CTAs would end apart.
  __device__ __forceinline__ unsigned PlanTile(const Assignment& at, bool counted) {
    Item& item = shared_.items[item_];
    const bool heads = Traits::kCluster > 1 && Opaque(static_cast<int>(p_.cluster_heads));
    const int pair = heads ? at.pair * Traits::kCluster + ClusterRank() : at.pair;
    const int batch = pair / Opaque(p_.num_heads), head = pair - batch * p_.num_heads;
    if (lane_ == 0) {
      item.head = head;
      item.kv_head = head / Opaque(p_.group);
    }
    Sequence found;
    int first;
    if (!FindTile<Along::kQueries, Traits::kClusterQueries, kDense, Traits::kJoins>(
            p_, batch, at.tile, &found, &first)) {
      return counted ? Count() : 0;
    }
    if (heads) first = at.tile * Traits::kQueries;
    if (lane_ == 0) {
      const bool packed = !kDense && p_.cu_q != nullptr;  // the maps have one batch member
      const int own =
          Traits::kCluster > 1 && !heads ? first + ClusterRank() * Traits::kQueries : first;
      item.sequence = found;
      item.first = own;
      item.q_row = own + (packed ? static_cast<int>(found.q_row) : 0);
      item.kv_row = packed ? static_cast<int>(found.kv_row) : 0;
      item.batch = packed ? 0 : found.batch;
      if constexpr (Traits::kDrops) {  // packed rows may be of no sequence, and there may be none
        if (p_.batch > 0) item.key = DropoutKey(p_.dropout, found.batch, p_.num_heads, head);
      }
    }
    __syncwarp();
    const int end = first + (heads ? Traits::kQueries : Traits::kClusterQueries);
    if constexpr (Traits::kPlansEntries) {
      if (p_.tile_kv == Traits::kKeys && p_.q_segments == nullptr) {
        return PlanEntries(first, min(end, item.sequence.q_len), counted);
      }
    }
    return PlanSteps(first, min(end, item.sequence.q_len), counted);
  }

  // The same as PlanSteps where every entry of the item's list is a step, or none. Each lane has
  // one of 32 entries, and up to kTogether lanes publish theirs at a time, which takes a small part
  // of the instructions of a walk.
  __device__ __forceinline__ unsigned PlanEntries(int first, int end, bool counted) {
    constexpr int kTogether = kSteps / 2;
    const Item& item = shared_.items[item_];
    const Sequence& s = item.sequence;
    const int64_t rows = (p_.q_len + p_.tile_q - 1) / p_.tile_q;
    const int64_t list = ListsOf(p_, s.batch, item.head) * rows + first / p_.tile_q;
    const int32_t* const entries = p_.tile_indices + list * p_.max_tiles + lane_;
    int entry = lane_ < p_.max_tiles ? __ldg(entries) : -1;  // it does not wait for the count
    const int count = min(__ldg(p_.tile_counts + list), p_.max_tiles);
    int begin, stop;
    s.VisibleKeys(first, end, &begin, &stop);
    const int length = static_cast<int>(p_.kv_len);
    Step last{};  // found, but not published
    bool starts = true;
#pragma unroll 1
    for (int base = 0; base < count; base += 32) {
      if (base > 0) entry = base + lane_ < count ? __ldg(entries + base) : -1;
      const bool partial = p_.tile_masks != nullptr && entry >= KVBLOCK_ATTENTION_PARTIAL;
      if (partial) entry -= KVBLOCK_ATTENTION_PARTIAL;
      const bool listed = base + lane_ < count;
      const bool exists = listed && entry >= 0 && entry <= (length - 1) / Traits::kKeys;
      const int key = exists ? entry * Traits::kKeys : 0, after = key + Traits::kKeys;
      const bool visit = exists && max(begin, key) < min(stop, after);
      const bool whole = !partial && s.AllVisible(first, end, key, after);
      const unsigned visits = __ballot_sync(~0u, visit);
      if (visits == 0) continue;
      Step step{key, s.kv_len, whole ? 0 : Step::kMasked, item_};
      if (s.kv_len < min(after, length)) step.flags |= Step::kDirty;
      const int nth = __popc(visits & ((1u << lane_) - 1)), steps = __popc(visits) - 1;
      if (starts) {
        if (lane_ == 0) Announce(Item::kTiles);
        if (nth == 0) step.flags |= Step::kStarts;
        __syncwarp();
      } else {
        PublishStep(lane_ == 0, published_, last);
        ++published_;
      }
      starts = false;
#pragma unroll 1
      for (int from = 0; from < steps; from += kTogether) {
        const bool now = visit && nth >= from && nth < min(from + kTogether, steps);
        PublishStep(now, published_ + nth, step);
      }
      published_ += steps;
      const int at = 31 - __clz(visits);
      last.first = __shfl_sync(~0u, step.first, at);
      last.end = s.kv_len;
      last.flags = __shfl_sync(~0u, step.flags, at);
      last.item = item_;
    }
    if (starts) {
      if (lane_ == 0) Announce(Item::kEmpty);
      last = {0, 0, 0, item_};
      __syncwarp();
    } else {
      last.flags |= Step::kLast;
    }
    const unsigned before = counted ? Count() : 0;  // as late as PlanSteps does
    PublishStep(lane_ == 0, published_, last);
    ++published_;
    item_ = (item_ + 1) % kItems;
    return before;
  }
  // The lanes that are `now` to: step `number` of theirs, when there is room for it.
  __device__ __forceinline__ void PublishStep(bool now, unsigned number, const Step& step) {
    if (now) {
      const unsigned place = number % kSteps;
      BarrierWait(SharedAddress(&shared_.step_empty[place]), number / kSteps % 2 ^ 1);
      shared_.steps[place] = step;
      BarrierArrive(SharedAddress(&shared_.step_full[place]));
    }
    __syncwarp();
  }

  // The KV tiles of the item, whose queries (with those of its cluster) are [first, end).
  __device__ __forceinline__ unsigned PlanSteps(int first, int end, bool counted) {
    Item& item = shared_.items[item_];
    const Sequence& s = item.sequence;
    {
      const Walk walk(p_, s, item.head, first, end);
      if (lane_ == 0) shared_.walk = walk.state();
      if constexpr (Traits::kSharesKeys) {
        if (lane_ == 0 && item.pieces > 1) TakePart(&item);
      }
      __syncwarp();
    }
    if constexpr (Traits::kSharesKeys) {
      if (item.pieces == 0) return counted ? Count() : 0;
    }
    scales_window_ = -1;
    bool starts = true;
    for (Step step; Next(s, &step); starts = false) {
      if (starts) {
        if (lane_ == 0) Announce(Item::kTiles);
        step.flags |= Step::kStarts;
      } else {
        Publish(0);
      }
      Prepare(step);
    }
    if (starts) {
      if constexpr (Traits::kJoins) return counted ? Count() : 0;  // its o and lse stay as they are
      if (lane_ == 0) Announce(Item::kEmpty);
      Prepare({0, 0, 0, item_});
    }
    const unsigned count = counted ? Count() : 0;  // under way while the last step is published
    Publish(starts ? 0 : Step::kLast);
    item_ = (item_ + 1) % kItems;
    return count;
  }

  // The item is complete; the writer may look at it.
  __device__ __forceinline__ void Announce(decltype(Item::is) is) {
    shared_.items[item_].is = is;
    if constexpr (Traits::kJoins) BarrierArrive(SharedAddress(&shared_.joined.item_full[item_]));
  }

  // Moves the walk, which is parked in shared memory, to the next tile.
  __device__ __forceinline__ bool Next(const Sequence& s, Step* step) {
    Walk walk(p_, s, shared_.walk);
    const bool found = walk.Next();
    if (found) {
      const int flags =
          (AllVisible(walk) ? 0 : Step::kMasked) | (walk.one_segment() ? 0 : Step::kSegments);
      *step = {walk.first(), walk.limit(), flags, item_};
      const int rows = static_cast<int>(p_.kv_len) - shared_.items[item_].kv_row;  // then zeros
      if constexpr (Traits::kPaged) {
        // No query of the sequence sees what lies beside these.
        const bool beside =
            step->first < s.FirstKey(0) || step->first + Traits::kKeys > s.EndKey(s.q_len - 1);
        if (beside && p_.box_rows > 0) step->flags |= Step::kDirty;
      } else if (!kDense && step->end < min(step->first + Traits::kKeys, rows)) {
        step->flags |= Step::kDirty;
      }
    }
    __syncwarp();  // all lanes have read it
    if (lane_ == 0) walk.ParkNext(&shared_.walk);
    __syncwarp();
    return found;
  }
  // Whether the walk's tile needs no mask; the walk of a cluster is that of all its query tiles.
  __device__ __forceinline__ bool AllVisible(const Walk& walk) const {
    if (Traits::kCluster == 1) return walk.all_visible();
    const Item& item = shared_.items[item_];
    const int end = min(item.first + Traits::kQueries, item.sequence.q_len);
    return item.sequence.AllVisible(item.first, end, walk.first(), walk.first() + Traits::kKeys);
  }
  // A step is prepared when it is found, and published when it is known whether it is the last.
  __device__ __forceinline__ void Prepare(const Step& step) {
    BarrierWait(SharedAddress(&shared_.step_empty[published_ % kSteps]),
                published_ / kSteps % 2 ^ 1);
    if (lane_ == 0) shared_.steps[published_ % kSteps] = step;
    if constexpr (Traits::kNarrow && Traits::kPaged) {
      PreparePagedScale(step);
    } else if constexpr (Traits::kNarrow) {
      PrepareScale(step);
    }
  }
  // The scale of a step's scores. Lanes have those of 32 tiles of keys that follow one another, so
  // that a step in 32 waits for memory.
  __device__ __forceinline__ void PrepareScale(const Step& step) {
    if (step.end == 0) return;  // no tile
    static_assert(Traits::kKeys == kScaleRows && Traits::kQueries == kScaleRows);
    const Item& item = shared_.items[step.item];
    const int block = step.first / kScaleRows, window = block / 32;
    if (window != scales_window_) {
      scales_window_ = window;
      const int batch = item.sequence.batch;
      const float* const q = ScalesOf(p_, p_.q_scales, batch, p_.num_heads, item.head);
      const float* const k = ScalesOf(p_, p_.k_scales, batch, p_.num_kv_heads, item.kv_head);
      // The last tile of queries of a cluster may lie past the end.
      const float of_queries = ScaleAt(q, min(item.first / kScaleRows, p_.q_scales.blocks - 1));
      const float of_keys = ScaleAt(k, min(window * 32 + lane_, p_.k_scales.blocks - 1));
      to_log2_ = ToLog2(of_queries, of_keys);
    }
    const float to_log2 = __shfl_sync(~0u, to_log2_, block % 32);
    if (lane_ == 0) shared_.narrow.to_log2[published_ % kSteps] = to_log2;
  }
  // The same where keys lie in blocks: it is one for all steps of an item.
  __device__ __forceinline__ void PreparePagedScale(const Step& step) {
    if (step.end == 0) return;  // no tile
    if (scales_window_ < 0) {
      scales_window_ = 0;
      const Item& item = shared_.items[step.item];
      const int unit = static_cast<int>(p_.by_pack(static_cast<uint32_t>(item.head)));
      const float of_queries = __ldg(p_.q_scales + int64_t{item.q_row} * p_.num_pairs + unit);
      const float of_keys = HeadScale(p_.k_scale, item.kv_head);
      to_log2_ = ToLog2(of_queries, of_keys >= 0.0f ? of_keys : __int_as_float(0x7fffffff));
    }
    if (lane_ == 0) shared_.narrow.to_log2[published_ % kSteps] = to_log2_;
  }
  __device__ __forceinline__ float ToLog2(float of_queries, float of_keys) const {
    const float to_log2 = of_queries * of_keys * (p_.scale * kLog2E);
    // Not 0, which would make NaN of masked scores. Sums of products stay below 2^25.
    constexpr float kLeast = 1e-30f;
    return to_log2 < kLeast ? kLeast : to_log2;
  }
  __device__ __forceinline__ void Publish(int flags) {
    if (lane_ == 0) {
      shared_.steps[published_ % kSteps].flags |= flags;
      BarrierArrive(SharedAddress(&shared_.step_full[published_ % kSteps]));
    }
    __syncwarp();
    ++published_;
  }

  const typename Traits::Params& p_;
  ForwardShared<Traits>& shared_;
  const int lane_;
  int item_ = 0;
  unsigned published_ = 0;  // steps
  int scales_window_ = -1;  // of 8 bits: of which tiles the lanes have scales
  float to_log2_ = 0.0f;
};

}  // namespace kvblock::hopper
