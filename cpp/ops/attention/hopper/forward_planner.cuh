// The planner of Hopper's forward kernel (forward.cuh), a warp: which query tiles are this CTA's,
// and which KV tiles they see.
#pragma once

#include <cstdint>

#include "device/cluster.cuh"
#include "device/mbarrier.cuh"
#include "ops/attention/hopper/forward_shared.cuh"

namespace kvblock::hopper {

struct Assignment {
  enum { kTile, kNone, kEnd } is;
  int pair, tile;
};
__device__ __forceinline__ Assignment Assign(const ForwardParams& p, int section, int index) {
  const int pairs = min(p.heads_apart, p.num_pairs - section * p.heads_apart);
  if (index >= pairs * p.tiles) return {Assignment::kNone};
  return {Assignment::kTile, section * p.heads_apart + index % pairs, p.tiles - 1 - index / pairs};
}
// The tile at a place in the order.
__device__ __forceinline__ Assignment AssignInOrder(const ForwardParams& p, int64_t index) {
  if (index >= int64_t{p.tiles} * p.num_pairs) return {Assignment::kEnd};
  const int section = static_cast<int>(index) / (p.heads_apart * p.tiles);
  return Assign(p, section, static_cast<int>(index) - section * p.heads_apart * p.tiles);
}
// The tile of CTA `cta` of `grid` (or of a cluster) in a round.
__device__ __forceinline__ Assignment AssignInRounds(const ForwardParams& p, int round, int cta,
                                                     int grid) {
  if (p.section_rounds == 0) return AssignInOrder(p, int64_t{round} * grid + cta);
  const int section = round / p.section_rounds;
  if (section * p.heads_apart >= p.num_pairs) return {Assignment::kEnd};
  round -= section * p.section_rounds;
  return Assign(p, section, round * grid + ((section + round) % 2 != 0 ? grid - 1 - cta : cta));
}

template <typename Traits>
class Planner {
 public:
  __device__ __forceinline__ Planner(const ForwardParams& p, ForwardShared<Traits>& shared)
      : p_(p), shared_(shared), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void Run() {
    const int grid = gridDim.x / Traits::kCluster, cta = blockIdx.x / Traits::kCluster;
    const bool counted = Traits::kCluster == 1 && p_.counter >= 0;
    int64_t index = cta;
    for (int round = 0;; ++round) {
      const Assignment at =
          counted ? AssignInOrder(p_, index) : AssignInRounds(p_, round, cta, grid);
      if (at.is == Assignment::kEnd) break;
      const unsigned count = at.is == Assignment::kTile ? PlanTile(at, counted) : 0;
      index = int64_t{grid} + __shfl_sync(~0u, count, 0);
    }
    if (lane_ == 0) shared_.items[item_].is = Item::kEnd;
    Emit({0, 0, 0, item_});
  }

 private:
  using Walk = TileWalk<Along::kKeys, Traits::kKeys>;

  // How many tiles were counted before this one; in lane 0.
  __device__ __forceinline__ unsigned Count() {
    if (lane_ != 0) return 0;
    unsigned* const counter = forward_counters + p_.counter;
    const unsigned count = atomicAdd(counter, 1);
    if (count + 1 == static_cast<unsigned>(p_.tiles) * p_.num_pairs) *counter = 0;
    return count;
  }

  // Returns how many tiles were counted before, in lane 0. It is asked for as late as possible, or
  // the next tile would be this CTA's long before it is done with this one; then others that are
  // done earlier would not have it, and the CTAs would end apart.
  __device__ __forceinline__ unsigned PlanTile(const Assignment& at, bool counted) {
    Sequence found;
    int first;
    const bool heads = Traits::kCluster > 1 && p_.cluster_heads;
    const int pair = heads ? at.pair * Traits::kCluster + ClusterRank() : at.pair;
    const int batch = pair / p_.num_heads, head = pair - batch * p_.num_heads;
    if (!FindTile<Along::kQueries, Traits::kClusterQueries>(p_, batch, at.tile, &found, &first)) {
      return counted ? Count() : 0;
    }
    if (heads) first = at.tile * Traits::kQueries;
    const int end = first + (heads ? Traits::kQueries : Traits::kClusterQueries);
    const int own =
        Traits::kCluster > 1 && !heads ? first + ClusterRank() * Traits::kQueries : first;
    Item& item = shared_.items[item_];
    if (lane_ == 0) {
      const bool packed = p_.cu_q != nullptr;  // the maps have one batch member
      item.sequence = found;
      item.head = head;
      item.first = own;
      item.q_row = own + (packed ? static_cast<int>(found.q_row) : 0);
      item.kv_row = packed ? static_cast<int>(found.kv_row) : 0;
      item.kv_head = head / p_.group;
      item.batch = packed ? 0 : found.batch;
    }
    __syncwarp();
    const Sequence& s = item.sequence;
    Park(Walk(p_, s, head, first, min(end, s.q_len)));
    Step step, next;
    unsigned count = 0;
    for (bool any = false, more = true; more; any = true) {  // a step behind: is it the last?
      more = Next(s, &next);
      if (!more && counted) count = Count();  // under way while the last step waits for its place
      if (!any) {
        if (lane_ == 0) item.is = more ? Item::kTiles : Item::kEmpty;
        if (!more) Emit({0, 0, 0, item_});
        if (more) next.flags |= Step::kStarts;
      } else {
        const int rows = static_cast<int>(p_.kv_len) - item.kv_row;  // beyond them come zeros
        const bool dirty = step.end < min(step.first + Traits::kKeys, rows);
        step.flags |= (more ? 0 : Step::kLast) | (dirty ? Step::kDirty : 0);
        Emit(step);
      }
      step = next;
    }
    item_ = (item_ + 1) % kItems;
    return count;
  }

  // Moves the walk, which is parked in shared memory, to the next tile.
  __device__ __forceinline__ bool Next(const Sequence& s, Step* step) {
    Walk walk(p_, s, shared_.walk);
    const bool found = walk.Next();
    const int flags =
        (AllVisible(walk) ? 0 : Step::kMasked) | (walk.one_segment() ? 0 : Step::kSegments);
    if (found) *step = {walk.first(), walk.limit(), flags, item_};
    Park(walk);
    return found;
  }
  // Whether the walk's tile needs no mask; the walk of a cluster is that of all its query tiles.
  __device__ __forceinline__ bool AllVisible(const Walk& walk) const {
    if (Traits::kCluster == 1) return walk.all_visible();
    const Item& item = shared_.items[item_];
    const int end = min(item.first + Traits::kQueries, item.sequence.q_len);
    return item.sequence.AllVisible(item.first, end, walk.first(), walk.first() + Traits::kKeys);
  }
  __device__ __forceinline__ void Park(const Walk& walk) {
    __syncwarp();  // all lanes have read it
    if (lane_ == 0) shared_.walk = walk.state();
    __syncwarp();
  }

  __device__ __forceinline__ void Emit(const Step& step) {
    const int at = steps_.stage;
    BarrierWait(SharedAddress(&shared_.step_empty[at]), steps_.phase ^ 1);
    if (lane_ == 0) {
      shared_.steps[at] = step;
      BarrierArrive(SharedAddress(&shared_.step_full[at]));
    }
    __syncwarp();
    steps_.Advance();
  }

  const ForwardParams& p_;
  ForwardShared<Traits>& shared_;
  const int lane_;
  int item_ = 0;
  StageCount<kSteps> steps_;
};

}  // namespace kvblock::hopper
