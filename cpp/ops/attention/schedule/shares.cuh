// How the KV tiles of a launch are shared out among CTAs, evenly, whatever the lengths are.
//
// A unit is a tile of query rows of one batch member and key head; its work is the KV tiles that
// some of its rows can see. All tiles of all units lie in one line: members in order, for each its
// tiles of rows, for each of these its key heads. CTA c of `ctas` takes the tiles
//
//   [Begin(c), Begin(c + 1)),   Begin(c) = total * c / ctas
//
// so a unit may be cut between CTAs, anywhere. What a CTA has of one unit is a piece. A piece that
// is the whole unit is a result; of the others, which are the first or the last of their CTA, a
// CTA has two places for what they come to, and combine.cuh puts those of a unit together.
//
// Lengths lie on the device. Every CTA counts the tiles of all members for itself: that takes
// neither a launch nor memory, and for a batch up to its threads a load or two each.
#pragma once

#include <cstdint>

#include "ops/attention/contract/params.cuh"
#include "ops/attention/mask/sequence.cuh"

namespace kvblock {

struct ShareParams : AttentionParams {
  int32_t ctas;
  int32_t row_tiles;  // of a member and key head
  int32_t rows;       // of such a tile
  bool alike;         // all units have as many KV tiles
  int32_t joining;    // warps that combine a row together: 1, 2, 4 or 8
  // What pieces come to: [2 * ctas, rows, value_dim], and the log2 of their sums, [2 * ctas, rows].
  float* piece_o;
  float* piece_lse;
};

// The tiles of rows of one member, all of whose key heads see the same.
struct RowTile {
  Sequence sequence;
  int first_row;         // of the packed rows
  int first_key, tiles;  // the KV tiles begin at first_key
};

template <int kKeys>
__device__ __forceinline__ RowTile FindRowTile(const ShareParams& p, int index) {
  const int member = index / p.row_tiles, tile = index - member * p.row_tiles;
  RowTile found;
  found.sequence = MakeSequence(p, member);
  found.first_row = tile * p.rows;
  const int last_row = min(found.first_row + p.rows, static_cast<int>(p.q_len) * p.group) - 1;
  int begin, end;
  found.sequence.VisibleKeys(found.first_row / p.group, last_row / p.group + 1, &begin, &end);
  found.first_key = begin / kKeys * kKeys;
  // A unit that sees nothing has a tile, too, or nobody would write its rows.
  found.tiles = begin < end ? (end - found.first_key + kKeys - 1) / kKeys : 1;
  if (begin >= end) found.first_key = 0;
  return found;
}

// A place in the line: KV tile `tile` of key head `kv_head` of a tile of rows.
struct Place {
  int index, kv_head, tile;
  RowTile rows;
};

// The line, as the threads of one CTA count it. All of them call its functions together.
template <int kKeys, int kThreads>
class Line {
 public:
  __device__ __forceinline__ explicit Line(const ShareParams& p) : p_(p) {
    static_assert(kThreads % 32 == 0 && kThreads <= 1024);
    row_tiles_ = p.batch * p.row_tiles;
    each_ = (row_tiles_ + kThreads - 1) / kThreads;
    if (p.alike) {
      total_ = row_tiles_ > 0 ? FindRowTile<kKeys>(p, 0).tiles * p.num_kv_heads * row_tiles_ : 0;
      return;
    }
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int from = min(thread * each_, row_tiles_), to = min(from + each_, row_tiles_);
    int own = 0;
    for (int i = from; i < to; ++i) own += FindRowTile<kKeys>(p, i).tiles * p.num_kv_heads;
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    __shared__ int of_warps[kThreads / 32];
    if (lane == 31) of_warps[warp] = sum;
    __syncthreads();
    before_ = sum - own;
    total_ = 0;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) {
      if (i < warp) before_ += of_warps[i];
      total_ += of_warps[i];
    }
    own_ = own;
  }

  __device__ __forceinline__ int total() const { return total_; }
  __device__ __forceinline__ int Begin(int cta) const {
    return static_cast<int>(static_cast<int64_t>(total_) * cta / p_.ctas);
  }
  // The CTA that has a tile: the last one that begins at it or before.
  __device__ __forceinline__ int Owner(int tile) const {
    return static_cast<int>(((static_cast<int64_t>(tile) + 1) * p_.ctas - 1) / total_);
  }

  // Finds a tile that exists.
  __device__ __forceinline__ Place Find(int tile) const {
    Place at;
    int rest;
    if (p_.alike) {
      at.rows = FindRowTile<kKeys>(p_, 0);
      const int of_tile = at.rows.tiles * p_.num_kv_heads;
      at.index = tile / of_tile;
      rest = tile - at.index * of_tile;
      if (at.index > 0) at.rows = FindRowTile<kKeys>(p_, at.index);
    } else {
      __shared__ int found[2];
      __syncthreads();  // of an earlier search, all have read it
      if (tile >= before_ && tile < before_ + own_) {
        int i = threadIdx.x * each_, left = tile - before_;
        for (;; ++i) {
          const int tiles = FindRowTile<kKeys>(p_, i).tiles * p_.num_kv_heads;
          if (left < tiles) break;
          left -= tiles;
        }
        found[0] = i;
        found[1] = left;
      }
      __syncthreads();
      at.index = found[0];
      rest = found[1];
      at.rows = FindRowTile<kKeys>(p_, at.index);
    }
    at.kv_head = rest / at.rows.tiles;
    at.tile = rest - at.kv_head * at.rows.tiles;
    return at;
  }

  // Moves on by a tile, of which there is one.
  __device__ __forceinline__ void Next(Place* at) const {
    if (++at->tile < at->rows.tiles) return;
    at->tile = 0;
    if (++at->kv_head < p_.num_kv_heads) return;
    at->kv_head = 0;
    at->rows = FindRowTile<kKeys>(p_, ++at->index);
  }

 private:
  const ShareParams& p_;
  int row_tiles_, each_, total_;
  int before_ = 0, own_ = 0;  // KV tiles before this thread's tiles of rows, and of them
};

// Where a CTA puts a piece that is not whole: its first piece goes first.
__device__ __forceinline__ int PieceSlot(int cta, bool first) { return 2 * cta + (first ? 0 : 1); }

}  // namespace kvblock
