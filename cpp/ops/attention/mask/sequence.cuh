// Who attends to whom: one sequence, the visible range of a tile, and which tile is whose.
//
// Within a sequence, query i attends to the keys of a band, [i + left, i + right), cut to
// [0, kv_len). `left` and `right` hold shift and window together, clamped to +-kFar; lengths are
// smaller than that, so the clamp changes no comparison, and no sum overflows.
#pragma once

#include <cstdint>

#include "device/opaque.cuh"
#include "ops/attention/contract/params.cuh"

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

// The lists of tiles of a batch member and head, in the order in which they lie.
__device__ __forceinline__ int64_t ListsOf(const AttentionParams& p, int batch, int head) {
  const int64_t row = BatchRow(p, p.tile_batch, batch);
  return row * p.tile_heads + (p.tile_heads > 1 ? head : 0);
}

// Lengths and offsets come from device memory: nothing is trusted beyond the arrays' sizes.
// kDense: every row takes part. kPacked: sequences may be packed.
template <bool kDense = false, bool kPacked = !kDense>
__device__ __forceinline__ Sequence MakeSequence(const AttentionParams& p, int b) {
  const int T = static_cast<int>(p.q_len), S = static_cast<int>(p.kv_len);
  Sequence s;
  s.batch = b;
  if (kPacked && p.cu_q != nullptr) {
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

// Packed, the rows of one side fall in batch + 2 pieces: those before the first sequence, one for
// each sequence and those after the last. Rows that no sequence owns have tiles of their own.
//
// What a lane of a warp has of 32 pieces that follow one another.
template <Along kAlong, int kTile>
struct PackedPiece {
  int begin, end, tiles;
  int before;  // the tiles of this piece and of the lanes' before

  // kSeen: queries that have no keys at all have no tiles.
  template <bool kSeen>
  __device__ __forceinline__ static PackedPiece At(const AttentionParams& p, int piece) {
    const int* const cu = kAlong == Along::kQueries ? p.cu_q : p.cu_kv;
    const int total = static_cast<int>(kAlong == Along::kQueries ? p.q_len : p.kv_len);
    PackedPiece at;
    at.begin = Bound(p, cu, total, piece);
    at.end = max(at.begin, Bound(p, cu, total, piece + 1));
    at.tiles = (at.end - at.begin + kTile - 1) / kTile;
    if (kSeen) {
      static_assert(kAlong == Along::kQueries || !kSeen);
      const int keys = static_cast<int>(p.kv_len);
      const bool owned = piece >= 1 && piece <= p.batch;
      const bool seen =
          owned && Bound(p, p.cu_kv, keys, piece + 1) > Bound(p, p.cu_kv, keys, piece);
      if (!seen) at.tiles = 0;
    }
    at.before = at.tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, at.before, step);
      if (static_cast<int>(threadIdx.x % 32) >= step) at.before += other;
    }
    return at;
  }

 private:
  // Where piece i begins.
  __device__ __forceinline__ static int Bound(const AttentionParams& p, const int32_t* cu,
                                              int total, int i) {
    return i == 0 ? 0 : i > p.batch + 1 ? total : Clamp(cu[i - 1], 0, total);
  }
};

// How many tiles there are, of packed rows; a warp counts them.
template <Along kAlong, int kTile, bool kSeen = false>
__device__ __forceinline__ int CountTiles(const AttentionParams& p) {
  int tiles = 0;
  for (int base = 0; base < p.batch + 2; base += 32) {
    const auto at = PackedPiece<kAlong, kTile>::template At<kSeen>(p, base + threadIdx.x % 32);
    tiles += __shfl_sync(~0u, at.before, 31);
  }
  return tiles;
}

// Finds tile number `tile` (of kTile rows) along one side: its sequence, and the position of its
// first row there. False: there is no such tile. `b` is the batch member, unused when packed.
//
// Packed, a warp counts the tiles of 32 pieces at a time until it has passed `tile`. Rows that no
// sequence owns come back as a sequence whose rows take no part.
template <Along kAlong, int kTile, bool kDense = false, bool kSeen = false>
__device__ __forceinline__ bool FindTile(const AttentionParams& p, int b, int tile, Sequence* s,
                                         int* first) {
  if (kDense || p.cu_q == nullptr) {
    *s = MakeSequence<kDense>(p, b);
    *first = tile * kTile;
    return true;
  }
  for (int base = 0; base < p.batch + 2; base += 32) {
    const auto at = PackedPiece<kAlong, kTile>::template At<kSeen>(p, base + threadIdx.x % 32);
    const unsigned passed = __ballot_sync(~0u, at.before > tile);
    if (passed != 0) {
      const int owner = __ffs(passed) - 1, found = base + owner;
      *first = (tile - __shfl_sync(~0u, at.before - at.tiles, owner)) * kTile;
      if (found >= 1 && found <= p.batch) {
        *s = MakeSequence(p, found - 1);
      } else {
        const int rows = __shfl_sync(~0u, at.end - at.begin, owner);
        const int row = __shfl_sync(~0u, at.begin, owner);
        *s = Sequence{};
        s->q_row = s->kv_row = row;
        (kAlong == Along::kQueries ? s->q_rows : s->kv_rows) = rows;
      }
      return true;
    }
    tile -= __shfl_sync(~0u, at.before, 31);
  }
  return false;
}

}  // namespace kvblock
