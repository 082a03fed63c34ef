// Who attends to whom: one sequence's view, the visible ranges of a tile, and the walk over tiles.
//
// Within a sequence, query i attends to the keys of a band, [i + left, i + right), cut to
// [0, kv_len). `left` and `right` hold shift and window together, clamped to +-kFar; lengths are
// smaller than that, so the clamp changes no comparison, and no sum overflows.
#pragma once

#include <cstdint>

#include "device/opaque.cuh"
#include "ops/attention/common/params.cuh"

namespace kvblock {

enum class Along { kQueries, kKeys };

// One sequence: a batch member, or a packed sequence, or packed rows that no sequence owns.
struct Sequence {
  int batch;
  int64_t q_row, kv_row;  // its first row in q and in k
  int q_rows, kv_rows;    // rows that exist: outputs are written for all of them
  int q_len, kv_len;      // rows that take part
  int left, right;

  __device__ __forceinline__ int FirstKey(int query) const { return max(query + left, 0); }
  __device__ __forceinline__ int EndKey(int query) const { return min(query + right, kv_len); }
  __device__ __forceinline__ bool Attends(int query, int key) const {
    return query < q_len && key >= query + left && key < EndKey(query);
  }

  // The keys that some query of [q0, q1) may attend to: *first .. *end, empty when *first >= *end.
  __device__ __forceinline__ void VisibleKeys(int q0, int q1, int* first, int* end) const {
    *first = FirstKey(q0);
    *end = q0 < min(q1, q_len) ? EndKey(min(q1, q_len) - 1) : 0;
  }
  // The queries that may attend to some key of [k0, k1).
  __device__ __forceinline__ void VisibleQueries(int k0, int k1, int* first, int* end) const {
    *first = max(k0 - right + 1, 0);
    *end = k0 < min(k1, kv_len) ? min(min(k1, kv_len) - left, q_len) : 0;
  }
  // Whether every query of [q0, q1) attends to every key of [k0, k1), segments aside.
  __device__ __forceinline__ bool AllVisible(int q0, int q1, int k0, int k1) const {
    return q1 <= q_len && k1 <= kv_len && k0 >= q1 - 1 + left && k1 <= q0 + right;
  }

  // Where lse and delta of this sequence begin for one head.
  __device__ __forceinline__ int64_t LseRow(const AttentionParams& p, int head) const {
    return p.cu_q != nullptr ? head * p.q_len + q_row
                             : (static_cast<int64_t>(batch) * p.num_heads + head) * p.q_len;
  }
};

__device__ __forceinline__ int Clamp(int64_t value, int low, int high) {
  return static_cast<int>(value < low ? low : value > high ? high : value);
}

// Operands that batch members share: member b of p.batch reads row b / (p.batch / count) of
// `count`.
__device__ __forceinline__ int BatchRow(const AttentionParams& p, int count, int b) {
  return count == 1 ? 0 : b / (p.batch / count);
}

// Lengths and offsets come from device memory: nothing is trusted beyond the arrays' sizes.
// kDense: every row takes part.
template <bool kDense = false>
__device__ __forceinline__ Sequence MakeSequence(const AttentionParams& p, int b) {
  const int T = static_cast<int>(p.q_len), S = static_cast<int>(p.kv_len);
  Sequence s;
  s.batch = b;
  if (!kDense && p.cu_q != nullptr) {
    const int q0 = Clamp(p.cu_q[b], 0, T), k0 = Clamp(p.cu_kv[b], 0, S);
    s.q_row = q0;
    s.kv_row = k0;
    s.q_rows = s.q_len = Clamp(p.cu_q[b + 1], q0, T) - q0;
    s.kv_rows = s.kv_len = Clamp(p.cu_kv[b + 1], k0, S) - k0;
  } else {
    s.q_row = static_cast<int64_t>(b) * T;
    s.kv_row = static_cast<int64_t>(b) * S;
    s.q_rows = T;
    s.kv_rows = S;
    s.q_len = !kDense && p.q_lens != nullptr ? Clamp(p.q_lens[b], 0, T) : T;
    s.kv_len = !kDense && p.kv_lens != nullptr ? Clamp(p.kv_lens[b], 0, S) : S;
  }
  const int64_t shift = p.shift != nullptr ? p.shift[b] : 0;
  const int left = Opaque(p.window_left), right = Opaque(p.window_right);
  s.left = left < 0 ? -kFar : Clamp(shift - left, -kFar, kFar);
  s.right = right < 0 ? kFar : Clamp(shift + right + 1, -kFar, kFar);
  return s;
}

// Finds tile number `tile` (of kTile rows) along one side: its sequence, and the position of its
// first row there. False: there is no such tile. `b` is the batch member, unused when packed.
//
// Packed, the rows fall in batch + 2 pieces: those before the first sequence, one for each sequence
// and those after the last. Each warp counts the tiles of 32 pieces at a time until it has passed
// `tile`. Rows that no sequence owns come back as a sequence whose rows take no part.
template <Along kAlong, int kTile, bool kDense = false>
__device__ __forceinline__ bool FindTile(const AttentionParams& p, int b, int tile, Sequence* s,
                                         int* first) {
  if (kDense || p.cu_q == nullptr) {
    *s = MakeSequence<kDense>(p, b);
    *first = tile * kTile;
    return true;
  }
  const int32_t* cu = kAlong == Along::kQueries ? p.cu_q : p.cu_kv;
  const int total = static_cast<int>(kAlong == Along::kQueries ? p.q_len : p.kv_len);
  const int lane = threadIdx.x % 32;
  const auto bound = [&](int i) {  // where piece i begins
    return i == 0 ? 0 : i > p.batch + 1 ? total : Clamp(cu[i - 1], 0, total);
  };
  for (int base = 0; base < p.batch + 2; base += 32) {
    const int piece = base + lane;
    const int begin = bound(piece), end = max(begin, bound(piece + 1));
    const int tiles = (end - begin + kTile - 1) / kTile;
    int before = tiles;  // becomes the tiles of this piece and those to the left of it
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, before, step);
      if (lane >= step) before += other;
    }
    const unsigned passed = __ballot_sync(~0u, before > tile);
    if (passed != 0) {
      const int owner = __ffs(passed) - 1, found = base + owner;
      *first = (tile - __shfl_sync(~0u, before - tiles, owner)) * kTile;
      if (found >= 1 && found <= p.batch) {
        *s = MakeSequence(p, found - 1);
      } else {
        const int rows = __shfl_sync(~0u, end - begin, owner);
        const int row = __shfl_sync(~0u, begin, owner);
        *s = Sequence{};
        s->q_row = s->kv_row = row;
        (kAlong == Along::kQueries ? s->q_rows : s->kv_rows) = rows;
      }
      return true;
    }
    tile -= __shfl_sync(~0u, before, 31);
  }
  return false;
}

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
    const int64_t tb = BatchRow(p, p.tile_batch, s.batch), tn = p.tile_heads > 1 ? head : 0;
    at->list = (tb * p.tile_heads + tn) * ((rows + tile - 1) / tile) + at->fixed_first / tile;
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
      if (at_.window >= at_.stretch_end && !NextStretch()) return false;
      FillWindow();
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

  __device__ __forceinline__ bool NextStretch() {
    if (!HasLists()) {  // there is one, whose end is not 0
      if (at_.stretch_end != 0 || at_.begin >= at_.end) return false;
      BeginStretch(at_.begin, at_.end, kFromTheEnd ? -FirstLacks<kTile>(s_.q_len) : 0);
      return true;
    }
    const int tile = kOverKeys ? p_.tile_kv : p_.tile_q;
    const int length = static_cast<int>(kOverKeys ? p_.kv_len : p_.q_len);
    while (at_.stretch < at_.stretches) {
      const int64_t list = at_.list * (kOverKeys ? p_.max_tiles : p_.max_tiles_t);
      const int index =
          __ldg((kOverKeys ? p_.tile_indices : p_.tile_indices_t) + list + at_.stretch);
      ++at_.stretch;
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

  __device__ __forceinline__ void FillWindow() {
    const int first = at_.window + static_cast<int>(threadIdx.x % 32) * kTile;
    const int end = first + kTile;
    bool visit = first < at_.stretch_end;
    bool whole = visit && (kOverKeys ? s_.AllVisible(at_.fixed_first, at_.fixed_end, first, end)
                                     : s_.AllVisible(first, end, at_.fixed_first, at_.fixed_end));
    if (!kDivides && HasLists()) whole = whole && end <= at_.stretch_end;
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
