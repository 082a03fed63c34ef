// The walk over the tiles that a tile can see: by the band, by segments and by lists of tiles.
#pragma once

#include <cstdint>

#include "ops/attention/contract/params.cuh"
#include "ops/attention/mask/sequence.cuh"

namespace kvblock {

// The smallest and largest segment of positions [first, end), from the ranges of their chunks.
__device__ __forceinline__ int2 SegmentRange(const int32_t* ranges, int chunks, int batch,
                                             int first, int end) {
  constexpr int kChunk = KVBLOCK_ATTENTION_CHUNK;
  int2 range = make_int2(INT32_MAX, INT32_MIN);
  const int last = min(chunks, (end + kChunk - 1) / kChunk);
  for (int c = first / kChunk; c < last; ++c) {
    const int2 r =
        __ldg(reinterpret_cast<const int2*>(ranges) + static_cast<unsigned>(batch * chunks + c));
    range = make_int2(min(range.x, r.x), max(range.y, r.y));
  }
  return range;
}

// Where a walk over tiles stands. Plain data: a kernel short of registers parks it in shared
// memory.
struct WalkState {
  int fixed_first, fixed_end;    // the tile that walks, on its own side
  int begin, end;                // what it can see of the other side
  int64_t list;                  // its row of the lists
  int stretch, stretches;        // of the lists: the next one, and how many there are
  int window, stretch_end;       // where the window begins and where the stretch ends
  unsigned pending, whole;       // tiles of the window: still to visit; without a mask
  unsigned same;                 // ... all of one segment, that of the tile that walks
  int segment_min, segment_max;  // of the tile that walks
};

// How many rows the first of the tiles lacks that end with a sequence of so many: a multiple of 8,
// so that the last tile lacks up to 7.
template <int kTile>
__device__ __forceinline__ int FirstLacks(int rows) {
  return (kTile - rows % kTile) % kTile / 8 * 8;
}

// The KV tiles that a query tile visits, in order (kAlong = kKeys), or the query tiles that a KV
// tile visits (kAlong = kQueries; the lists are the transposed ones).
//
//   TileWalk<Along::kKeys, 64> walk(p, sequence, head, q0, min(q0 + 128, sequence.q_len));
//   while (walk.Next()) { ... walk.first(), walk.all_visible() ... }
//
// The visible range is one stretch, or the listed tiles that meet it, each a stretch. A stretch is
// looked at in windows of 32 tiles, one a lane; ballots say which tiles to visit and which of those
// need no mask. Every warp walks for itself and all lanes of a warp together.
//
// What a call may have besides the band can be less, for a kernel short of registers. Without lists
// the tiles may end with the sequence instead of beginning with it (kFromTheEnd; FirstLacks).
enum class Walks { kAll, kSegments, kBand };
template <Along kAlong, int kTile, Walks kWalks = Walks::kAll, bool kFromTheEnd = false>
class TileWalk {
 public:
  using State = WalkState;

  // [first, end): the positions of the tile that walks, on the other side. Where rows past q_len
  // do no harm, an end that is cut to q_len leaves fewer tiles to mask.
  __device__ __forceinline__ TileWalk(const AttentionParams& p, const Sequence& s, int head,
                                      int first, int end)
      : p_(p), s_(s), at_{} {
    at_.fixed_first = first;
    at_.fixed_end = end;
    if (kOverKeys) {
      s.VisibleKeys(first, end, &at_.begin, &at_.end);
    } else {
      s.VisibleQueries(first, end, &at_.begin, &at_.end);
    }
    if (HasLists()) TakeLists(p, s, head, &at_);
    if (HasSegments()) {
      const int2 range = Range(!kOverKeys, first, end);
      at_.segment_min = range.x;
      at_.segment_max = range.y;
    }
  }
  // The lists of a head, for a walk that has not begun.
  __device__ __forceinline__ static void TakeLists(const AttentionParams& p, const Sequence& s,
                                                   int head, WalkState* at) {
    const int64_t rows = kOverKeys ? p.q_len : p.kv_len;
    const int64_t tile = kOverKeys ? p.tile_q : p.tile_kv;
    at->list = ListsOf(p, s.batch, head) * ((rows + tile - 1) / tile) + at->fixed_first / tile;
    const int count = (kOverKeys ? p.tile_counts : p.tile_counts_t)[at->list];
    at->stretches = min(count, kOverKeys ? p.max_tiles : p.max_tiles_t);
  }
  // Takes up a parked walk.
  __device__ __forceinline__ TileWalk(const AttentionParams& p, const Sequence& s,
                                      const WalkState& at)
      : p_(p), s_(s), at_(at) {}
  __device__ __forceinline__ const WalkState& state() const { return at_; }
  // Parks again what Next changes.
  __device__ __forceinline__ void ParkNext(WalkState* parked) const {
    if (HasLists()) parked->stretch = at_.stretch;
    parked->window = at_.window;
    parked->stretch_end = at_.stretch_end;
    parked->pending = at_.pending;
    parked->whole = at_.whole;
    parked->same = at_.same;
  }

  // Moves to the next tile; false after the last.
  __device__ __forceinline__ bool Next() {
    while (at_.pending == 0) {
      at_.window += 32 * kTile;
      bool partial = false;  // a partial tile is no longer than a window
      if (at_.window >= at_.stretch_end && !NextStretch(&partial)) return false;
      FillWindow(partial);
    }
    const int bit = __ffs(at_.pending) - 1;
    at_.pending &= at_.pending - 1;
    first_ = at_.window + bit * kTile;
    all_visible_ = (at_.whole >> bit) & 1;
    one_segment_ = (at_.same >> bit) & 1;
    return true;
  }

  // Where the tile begins: a multiple of kTile, counted from the start of its listed tile, or, from
  // the end, from before the first row.
  __device__ __forceinline__ int first() const { return first_; }
  // Positions of the tile from here on are not to be seen: they are past the end of the sequence or
  // of the listed tile. (No tile that divides 128 reaches past a listed one.)
  __device__ __forceinline__ int limit() const {
    const int end = kOverKeys ? s_.kv_len : s_.q_len;
    return kDivides || !HasLists() ? end : min(end, at_.stretch_end);
  }
  __device__ __forceinline__ bool all_visible() const { return all_visible_; }
  __device__ __forceinline__ bool one_segment() const { return one_segment_; }

 private:
  static constexpr bool kOverKeys = kAlong == Along::kKeys;
  static constexpr bool kDivides = 128 % kTile == 0;  // a listed tile is whole kernel tiles
  static_assert(!kFromTheEnd || (kWalks != Walks::kAll && !kOverKeys));

  __device__ __forceinline__ bool HasLists() const {
    return kWalks == Walks::kAll && p_.tile_indices != nullptr;
  }
  __device__ __forceinline__ bool HasSegments() const {
    return kWalks != Walks::kBand && p_.q_segments != nullptr;
  }

  __device__ __forceinline__ int2 Range(bool keys, int first, int end) const {
    constexpr int kChunk = KVBLOCK_ATTENTION_CHUNK;
    const int length = static_cast<int>(keys ? p_.kv_len : p_.q_len);
    const int chunks = (length + kChunk - 1) / kChunk;
    return SegmentRange(keys ? p_.kv_segment_ranges : p_.q_segment_ranges, chunks, s_.batch, first,
                        end);
  }

  // partial: whether its listed tile has bits.
  __device__ __forceinline__ bool NextStretch(bool* partial) {
    if (!HasLists()) {  // there is one, whose end is not 0
      if (at_.stretch_end != 0 || at_.begin >= at_.end) return false;
      BeginStretch(at_.begin, at_.end, kFromTheEnd ? -FirstLacks<kTile>(s_.q_len) : 0);
      return true;
    }
    const int tile = kOverKeys ? p_.tile_kv : p_.tile_q;
    const int length = static_cast<int>(kOverKeys ? p_.kv_len : p_.q_len);
    while (at_.stretch < at_.stretches) {
      const int64_t list = at_.list * (kOverKeys ? p_.max_tiles : p_.max_tiles_t);
      int index = __ldg((kOverKeys ? p_.tile_indices : p_.tile_indices_t) + list + at_.stretch);
      ++at_.stretch;
      *partial = p_.tile_masks != nullptr && index >= KVBLOCK_ATTENTION_PARTIAL;
      if (*partial) index -= KVBLOCK_ATTENTION_PARTIAL;
      if (index < 0 || index > (length - 1) / tile) continue;
      const int from = max(at_.begin, index * tile), to = min(at_.end, index * tile + tile);
      if (from < to) {
        BeginStretch(from, to, kDivides ? 0 : index * tile);
        return true;
      }
    }
    return false;
  }
  // Tiles are counted from `origin`.
  __device__ __forceinline__ void BeginStretch(int from, int to, int origin) {
    at_.window = origin + (from - origin) / kTile * kTile;
    at_.stretch_end = to;
  }

  __device__ __forceinline__ void FillWindow(bool partial) {
    const int first = at_.window + static_cast<int>(threadIdx.x % 32) * kTile;
    const int end = first + kTile;
    bool visit = first < at_.stretch_end;
    bool whole = visit && (kOverKeys ? s_.AllVisible(at_.fixed_first, at_.fixed_end, first, end)
                                     : s_.AllVisible(first, end, at_.fixed_first, at_.fixed_end));
    if (!kDivides && HasLists()) whole = whole && end <= at_.stretch_end;
    if (HasLists()) whole = whole && !partial;
    bool same = true;
    if (HasSegments() && visit) {
      const int2 range = Range(kOverKeys, kFromTheEnd ? max(first, 0) : first, end);
      visit = range.x <= at_.segment_max && at_.segment_min <= range.y;
      same = range.x == range.y && at_.segment_min == at_.segment_max && range.x == at_.segment_min;
    }
    at_.pending = __ballot_sync(~0u, visit);
    at_.whole = __ballot_sync(~0u, whole && same);
    at_.same = __ballot_sync(~0u, same);
  }

  const AttentionParams& p_;
  const Sequence& s_;
  WalkState at_;
  int first_ = 0;
  bool all_visible_ = false, one_segment_ = false;
};

// The same where there is nothing but the band: one tile after the other.
struct BandWalkState {
  int fixed_first, fixed_end;  // the tile that walks, on its own side
  int first, end;              // on the other, where the walk stands and what can be seen
};
template <Along kAlong, int kTile>
class TileWalk<kAlong, kTile, Walks::kBand> {
 public:
  using State = BandWalkState;

  __device__ __forceinline__ TileWalk(const AttentionParams&, const Sequence& s, int, int first,
                                      int end)
      : s_(s), at_{} {
    at_.fixed_first = first;
    at_.fixed_end = end;
    int begin;
    if (kOverKeys) {
      s.VisibleKeys(first, end, &begin, &at_.end);
    } else {
      s.VisibleQueries(first, end, &begin, &at_.end);
    }
    at_.first = (begin / kTile - 1) * kTile;
  }
  __device__ __forceinline__ TileWalk(const AttentionParams&, const Sequence& s, const State& at)
      : s_(s), at_(at) {}
  __device__ __forceinline__ const State& state() const { return at_; }
  __device__ __forceinline__ void ParkNext(State* parked) const { parked->first = at_.first; }

  __device__ __forceinline__ bool Next() {
    at_.first += kTile;
    return at_.first < at_.end;
  }
  __device__ __forceinline__ int first() const { return at_.first; }
  __device__ __forceinline__ int limit() const { return kOverKeys ? s_.kv_len : s_.q_len; }
  __device__ __forceinline__ bool one_segment() const { return true; }
  __device__ __forceinline__ bool all_visible() const {
    const int first = at_.first, end = first + kTile;
    return kOverKeys ? s_.AllVisible(at_.fixed_first, at_.fixed_end, first, end)
                     : s_.AllVisible(first, end, at_.fixed_first, at_.fixed_end);
  }

 private:
  static constexpr bool kOverKeys = kAlong == Along::kKeys;
  const Sequence& s_;
  State at_;
};

}  // namespace kvblock
