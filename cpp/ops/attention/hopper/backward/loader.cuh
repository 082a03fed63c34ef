// Of the Hopper backward kernel: the warp that walks over the tiles of queries and starts the
// copies, and what others do of it at the beginning.
#pragma once

#include <cstdint>

#include "device/cluster.cuh"
#include "device/mbarrier.cuh"
#include "device/tensor_copy.cuh"
#include "ops/attention/hopper/backward/shared.cuh"
#include "ops/attention/mask/backward_scores.cuh"
#include "ops/attention/mask/tile_walk.cuh"

namespace kvblock::hopper {

// It has few registers: what it seldom needs waits in shared memory.
template <typename Shape, bool kPlain>
struct BackwardLoader {
  using Owned = BackwardOwned;
  using Step = BackwardStep;
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  using QueryTile = typename Shape::QueryTile;
  using GradTile = typename Shape::GradTile;
  // Tall tiles end with the sequence: the last one is then whole, and under a causal mask all keys
  // see it.
  using Walk = TileWalk<Along::kQueries, Shape::kQueries,
                        Shape::kTall ? Walks::kSegments : Walks::kAll, Shape::kTall>;

  // Whether the entries of lists are read without a walk, which takes registers.
  static constexpr int kListedQueries = 128;
  static constexpr bool kReadsEntries =
      Shape::kListed && kPlain && Shape::kPlainRegisters.loader >= 56;

  const BackwardCta<Shape> cta;
  const int lane;

  __device__ __forceinline__ const typename Shape::Params& p() const { return cta.p; }
  __device__ __forceinline__ Owned& owned() const { return cta.owned(); }

  // Rows `first` on of a sequence that begins at sequence_row of the packed array.
  template <typename Tile, bool kKeys = false>
  __device__ __forceinline__ void LoadTile(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                           int head, int64_t sequence_row, int first) const {
    const bool packed = p().cu_q != nullptr;
    const int row = packed ? static_cast<int>(sequence_row) + first : first;
    BarrierExpect(barrier, Tile::kBytes);
#pragma unroll
    for (int c = 0; c < Tile::kChunks; ++c) {
      LoadBox(to + (kKeys ? Shape::KeyChunk(c) : c) * Tile::kChunkBytes, map, barrier,
              c * kChunkColumns, head, row, packed ? 0 : owned().sequence.batch);
    }
  }
  // The same of queries: in a cluster each CTA loads a part of the columns, for all.
  template <typename Tile>
  __device__ __forceinline__ void LoadQueries(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                              int head, int64_t sequence_row, int first) const {
    if constexpr (Shape::kCluster == 1) {
      LoadTile<Tile>(to, map, barrier, head, sequence_row, first);
    } else {
      constexpr int kOwn = Tile::kChunks / Shape::kCluster;
      const bool packed = p().cu_q != nullptr;
      const int row = packed ? static_cast<int>(sequence_row) + first : first;
      BarrierExpect(barrier, Tile::kBytes);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int c = ClusterRank() * kOwn + i;
        LoadBoxToCtas(to + c * Tile::kChunkBytes, map, barrier, c * kChunkColumns, head, row,
                      packed ? 0 : owned().sequence.batch, (1 << Shape::kCluster) - 1);
      }
    }
  }
  __device__ __forceinline__ uint32_t PeerQFree(int stage) const {
    if constexpr (Shape::kClustered) return cta.PeerQFree(stage);
    return 0;  // there is no other CTA
  }
  __device__ __forceinline__ uint32_t PeerGradsFree(int stage) const {
    if constexpr (Shape::kClustered) return cta.PeerGradsFree(stage);
    return 0;
  }
  // Waits until a stage is free, in a cluster that of the other CTA, too.
  __device__ __forceinline__ void AwaitFree(uint32_t free, uint32_t peer_free, int phase) const {
    BarrierWait(free, phase ^ 1);
    if constexpr (Shape::kClustered) {
      if (lane == 0) ClusterBarrierArrive(peer_free, ClusterRank() ^ 1);
      BarrierWait(peer_free, phase);
    }
  }
  // One thread.
  __device__ __forceinline__ void LoadKeys() const {
    const Owned& o = owned();
    LoadTile<KeyTile, true>(cta.K(), cta.maps.k, cta.KFull(), o.kv_head, o.sequence.kv_row,
                            o.first_key);
    LoadTile<ValueTile>(cta.V(), cta.maps.v, cta.VFull(), o.kv_head, o.sequence.kv_row,
                        o.first_key);
    if constexpr (Shape::kClustered) {
      // Of the other CTA's keys those columns of which this one adds dQ.
      using Tile = typename Shape::PeerKeyTile;
      const bool packed = p().cu_q != nullptr;
      const int first = o.first_key ^ Shape::kKeys;
      BarrierExpect(cta.PeerKFull(), Tile::kBytes);
      for (int c = 0; c < Tile::kChunks; ++c) {
        LoadBox(cta.PeerK() + c * Tile::kChunkBytes, cta.maps.k, cta.PeerKFull(),
                (ClusterRank() * Tile::kChunks + c) * kChunkColumns, o.kv_head,
                packed ? static_cast<int>(o.sequence.kv_row) + first : first,
                packed ? 0 : o.sequence.batch);
      }
    }
  }

  // Another warp begins, beside the set-up of the barriers and while there are registers for the
  // walk: it starts the first step. In a cluster the other CTA's barriers may not be there yet, and
  // the first tile stays to be taken.
  __device__ __forceinline__ void Begin(const Sequence& s, int first_key, int kv_head) const {
    const int head = kv_head * p().group, first = Shape::FirstOfCluster(first_key);
    Walk walk(p(), s, head, first, first + Shape::kClusterKeys);
    if (lane == 0 && p().group > 1) owned().fresh_walk = walk.state();
    const bool more = walk.Next();
    BarrierMeet(kLoaderBegins, 2 * 32);
    WalkState at = walk.state();
    const bool begins = more && Shape::kCluster == 1;
    if (more && !begins) at.pending |= 1u << ((walk.first() - at.window) / Shape::kQueries);
    if (lane == 0) {
      owned().walk = at;
      owned().begun = begins;
    }
    if (begins) Start(0, head, walk.first(), MaskOf(walk.all_visible(), walk.one_segment()));
  }

  // The next tile of queries of this head; `fresh`: its first. False: there is none.
  __device__ __forceinline__ bool NextTile(int head, bool fresh, int* first, int* mask) const {
    WalkState& parked = owned().walk;
    const unsigned pending = parked.pending;
    if (!fresh && pending != 0) {  // what Walk::Next does nearly always
      const int bit = __ffs(pending) - 1;
      *first = parked.window + bit * Shape::kQueries;
      *mask = MaskOf((parked.whole >> bit & 1) != 0, (parked.same >> bit & 1) != 0);
      __syncwarp();
      if (lane == 0) parked.pending = pending & (pending - 1);
      __syncwarp();
      return true;
    }
    if (fresh) BeginHead(head);
    Walk walk(p(), owned().sequence, parked);
    const bool more = walk.Next();
    __syncwarp();
    if (lane == 0) walk.ParkNext(&parked);
    __syncwarp();
    *first = walk.first();
    *mask = MaskOf(walk.all_visible(), walk.one_segment());
    return more;
  }

  __device__ __forceinline__ void BeginHead(int head) const {
    constexpr int kWords = sizeof(WalkState) / 4;
    static_assert(kWords <= 32);
    const int* const from = reinterpret_cast<const int*>(&owned().fresh_walk);
    __syncwarp();  // all lanes have looked at what was parked
    if (lane < kWords) reinterpret_cast<int*>(&owned().walk)[lane] = from[lane];
    __syncwarp();
    if (!Shape::kTall && p().tile_indices != nullptr && lane == 0) {
      Walk::TakeLists(p(), owned().sequence, head, &owned().walk);
    }
    __syncwarp();
  }

  // Which masks a tile needs; a bias may be -inf.
  __device__ __forceinline__ static int MaskOf(bool visible, bool one_segment) {
    constexpr bool kBias = !kPlain && !Shape::kCapped;
    return (visible && !kBias ? 0 : Step::kMasked) | (one_segment ? 0 : Step::kSegments);
  }

  __device__ __forceinline__ static bool InTile(int row) {
    return Shape::kQueries % 32 == 0 || row < Shape::kQueries;
  }

  __device__ __forceinline__ void Publish(int step, const Step& what) const {
    if (lane == 0) {
      cta.StepAt(step) = what;
    }
    BarrierArrive(cta.QFull(step % Shape::kStages));
  }

  // The copies of a step's tile, its lse and delta, and what workers must know of it. A first tile
  // that lacks rows is `walked` from before the first query on; it is loaded whole, and lse = inf
  // keeps out what belongs to the next one.
  __device__ __forceinline__ void Start(int step, int head, int walked, int mask) const {
    constexpr int kQueries = Shape::kQueries, kStages = Shape::kStages,
                  kRows = (kQueries + 31) / 32;
    const int stage = step % kStages, phase = step / kStages % 2;
    const Sequence& s = owned().sequence;
    const int q_len = s.q_len;
    const int first = max(walked, 0), end = min(walked + kQueries, q_len);
    float lse[kRows], delta[kRows];
    {
      const int64_t from = s.LseRow(p(), head) + first + lane;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const bool valid = InTile(i * 32 + lane) && first + i * 32 + lane < end;
        lse[i] = valid ? __ldg(p().lse + from + i * 32) : -INFINITY;
        delta[i] = valid ? __ldg(p().delta + from + i * 32) : 0.0f;
        if constexpr (Shape::kDrops) delta[i] *= p().dropout.kept;
      }
    }
    AwaitFree(cta.QFree(stage), PeerQFree(stage), phase);
    if (lane == 0) {
      LoadQueries<QueryTile>(cta.Q(stage), cta.maps.q, cta.QFull(stage), head, s.q_row, first);
    }
    AwaitFree(cta.GradsFree(stage), PeerGradsFree(stage), phase);
    if (lane == 0) {
      LoadQueries<GradTile>(cta.Grads(stage), cta.maps.d_o, cta.GradsFull(stage), head, s.q_row,
                            first);
    }
    float* const rows = cta.Lse(0) + stage * kQueries + lane;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (!InTile(i * 32 + lane)) continue;
      rows[i * 32] = RowLse(lse[i]) * kLog2E;
      rows[i * 32 + kStages * kQueries] = RowDelta(lse[i], delta[i]);
    }
    const bool may_be_partial = p().cu_q != nullptr || q_len < s.q_rows;
    const bool partial = may_be_partial && first + kQueries > q_len;
    const int flags = mask | (partial ? Step::kPartial : 0);
    Publish(step, {first, head, flags, end});
  }

  __device__ __forceinline__ void Run() const {
    if constexpr (kReadsEntries) {
      if (p().tile_q == kListedQueries && p().q_segments == nullptr) return End(RunEntries());
    }
    End(RunWalk());
  }

  // Starts all steps but those that are begun; how many there are.
  __device__ __forceinline__ int RunWalk() const {
    int step = owned().begun, head = owned().kv_head * p().group;
    const int end_head = head + p().group;
    bool fresh = false;
    while (head < end_head) {
      int first;
      int mask;
      if (!NextTile(head, fresh, &first, &mask)) {
        ++head;
        fresh = true;
        continue;
      }
      fresh = false;
      Start(step, head, first, mask);
      ++step;
    }
    return step;
  }

  // The same where listed tiles have kListedQueries queries, with a small part of the instructions
  // of a walk.
  __device__ __forceinline__ int RunEntries() const {
    const int begun = owned().begun;
    int step = 0;
#pragma unroll 1
    for (int nth = 0; nth < p().group; ++nth) {
      const int head = owned().kv_head * p().group + nth;
      int base = 0, count;
      do {
        const unsigned own = ReadEntry(head, base, &count);
#pragma unroll 1
        for (unsigned found = __ballot_sync(~0u, (own & kVisits) != 0); found != 0;
             found &= found - 1) {
          const unsigned entry = __shfl_sync(~0u, own, __ffs(found) - 1);
          int first = static_cast<int>(entry / kEntry) * kListedQueries;
#pragma unroll 1
          for (unsigned parts = entry % kEntry; parts != 0;
               parts /= kPart, first += Shape::kQueries) {
            if ((parts & kVisit) == 0) continue;
            if (step >= begun) Start(step, head, first, MaskOf((parts & kWhole) != 0, true));
            ++step;
          }
        }
        base += 32;
      } while (base < count);
    }
    return step;
  }
  // What a lane has of 32 entries of a list: which tile, kEntry times, and what is to be done with
  // each kQueries of its queries, two bits for each.
  static constexpr unsigned kVisit = 1, kWhole = 2, kPart = 4, kVisits = 5, kEntry = 16;
  __device__ __forceinline__ unsigned ReadEntry(int head, int base, int* count) const {
    constexpr int kQueries = Shape::kQueries, kParts = kListedQueries / kQueries;
    static_assert(!kReadsEntries || kParts <= 2);
    const Sequence& s = owned().sequence;
    const WalkState& walk = owned().walk;  // what it can see is the same for all heads
    const int rows = static_cast<int>((p().kv_len - 1) / p().tile_kv) + 1;
    const int64_t list = ListsOf(p(), s.batch, head) * rows + walk.fixed_first / p().tile_kv;
    const int nth = base + lane, most = p().max_tiles_t;
    int entry = nth < most ? __ldg(p().tile_indices_t + list * most + nth) : -1;
    *count = min(__ldg(p().tile_counts_t + list), most);  // under way together
    const bool partial = p().tile_masks != nullptr && entry >= KVBLOCK_ATTENTION_PARTIAL;
    if (partial) entry -= KVBLOCK_ATTENTION_PARTIAL;
    const int last = static_cast<int>(p().q_len - 1) / kListedQueries;
    if (nth >= *count || entry < 0 || entry > last) return 0;
    unsigned own = entry * kEntry;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int first = entry * kListedQueries + part * kQueries, end = first + kQueries;
      const bool visit = end > walk.begin && first < walk.end;
      const bool whole = !partial && s.AllVisible(first, end, walk.fixed_first, walk.fixed_end);
      if (visit) own |= (whole ? kVisit | kWhole : kVisit) << 2 * part;
    }
    return own;
  }

  // After so many steps.
  __device__ __forceinline__ void End(int step) const {
    constexpr int kStages = Shape::kStages;
    const int stage = step % kStages, phase = step / kStages % 2;
    if (step == 0) {  // dK and dV, zeros, are written to where the keys land
      BarrierWait(cta.KFull(), 0);
      BarrierWait(cta.VFull(), 0);
      if constexpr (Shape::kClustered) BarrierWait(cta.PeerKFull(), 0);
    }
    BarrierWait(cta.QFree(stage), phase ^ 1);
    if (lane == 0) BarrierArrive(cta.QFull(stage));
    Publish(step, {0, 0, Step::kEnd});
  }
};

}  // namespace kvblock::hopper
