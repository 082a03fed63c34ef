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
  uint32_t ctas_inverse;  // 2^32 / ctas, rounded up
  int32_t row_tiles;      // of a member and key head
  int32_t rows;           // of such a tile
  bool alike;             // all units have as many KV tiles
  // Of the launch that combines: whether its CTAs are numbered by units, and how many threads
  // share out the pieces of a row: 1, 2, 4 or 8.
  bool combine_units;
  int32_t joining;
  // What pieces come to: [2 * ctas, rows, value_dim], and the log2 of their sums, [2 * ctas, rows].
  float* piece_o;
  float* piece_lse;
  int32_t* piece_there;  // not 0: it is there, of 2 * ctas
};

// The sequence of a batch member. Few queries are never packed.
__device__ __forceinline__ Sequence MemberSequence(const ShareParams& p, int member) {
  return MakeSequence<false, false>(p, member);
}

// A tile of rows of one member, all of whose key heads see the same. What else there is to know of
// the sequence is found again where it is needed, once a piece.
struct RowTile {
  int member, first_row;         // of the packed rows
  int first_key, tiles, kv_len;  // the KV tiles begin at first_key
};

template <int kKeys>
__device__ __forceinline__ RowTile FindRowTile(const ShareParams& p, int member, int first_row) {
  const Sequence s = MemberSequence(p, member);
  const int last_row = min(first_row + p.rows, static_cast<int>(p.q_len) * p.group) - 1;
  int begin, end;
  s.VisibleKeys(first_row / p.group, last_row / p.group + 1, &begin, &end);
  // A unit that sees nothing has a tile, too, or nobody would write its rows.
  const bool some = begin < end;
  const int first_key = some ? begin / kKeys * kKeys : 0;
  return {member, first_row, first_key, some ? (end - first_key + kKeys - 1) / kKeys : 1, s.kv_len};
}

// A place in the line: KV tile `tile` of key head `kv_head` of a tile of rows.
struct Place {
  int kv_head, tile;
  RowTile rows;
};

// The line, as the threads of one CTA count it. All of them call its functions together.
template <int kKeys, int kThreads>
class Line {
 public:
  __device__ __forceinline__ explicit Line(const ShareParams& p) : p_(p) {
    static_assert(kThreads % 32 == 0 && kThreads <= 1024);
    own_ = 0;
    VisitOwn([&](int, int, int tiles) {
      own_ += tiles;
      return true;
    });
    before_ = 0;
    total_ = p.alike ? own_ * p.batch : SumUp(own_, &before_);
    share_ = static_cast<unsigned>(total_) / static_cast<unsigned>(p.ctas);
    left_ = total_ - share_ * p.ctas;
  }

  __device__ __forceinline__ int total() const { return total_; }
  // total = share ctas + left, so it is share c + left c / ctas. kMostCtas squared times kMostCtas
  // is less than 2^32: then a product with the inverse is the quotient.
  __device__ __forceinline__ int Begin(int cta) const {
    return share_ * cta + static_cast<int>(__umulhi(left_ * cta, p_.ctas_inverse));
  }
  // The CTA that has a tile: the last one that begins at it or before.
  __device__ __forceinline__ int Owner(int tile) const {
    const float per_tile = __fdividef(static_cast<float>(p_.ctas), static_cast<float>(total_));
    int cta = min(static_cast<int>(static_cast<float>(tile) * per_tile), p_.ctas - 1);
    while (Begin(cta) > tile) --cta;
    while (cta + 1 < p_.ctas && Begin(cta + 1) <= tile) ++cta;
    return cta;
  }

  // The first tile of a unit; of one that does not exist, the total or more.
  __device__ __forceinline__ int FirstOf(int unit) const {
    if (p_.alike) return own_ / p_.num_kv_heads * unit;
    const int index = unit / p_.num_kv_heads, head = unit - index * p_.num_kv_heads;
    __shared__ int found;
    __syncthreads();
    if (threadIdx.x == 0) found = total_;
    __syncthreads();
    int before = before_;
    VisitOwn([&](int member, int first_row, int tiles) {
      const bool here = member * p_.row_tiles * p_.rows + first_row == index * p_.rows;
      if (here) found = before + tiles / p_.num_kv_heads * head;
      before += tiles;
      return !here;
    });
    __syncthreads();
    return found;
  }

  // Finds a tile that exists.
  __device__ __forceinline__ Place Find(int tile) const {
    Place at;
    int member, first_row, rest;
    if (p_.alike) {
      member = tile / own_;
      first_row = 0;
      rest = tile - member * own_;
    } else {
      __shared__ int found[3];
      __syncthreads();  // of an earlier search, all have read it
      if (tile >= before_ && tile < before_ + own_) {
        int left = tile - before_;
        VisitOwn([&](int own_member, int own_row, int tiles) {
          if (left >= tiles) {
            left -= tiles;
            return true;
          }
          found[0] = own_member;
          found[1] = own_row;
          found[2] = left;
          return false;
        });
      }
      __syncthreads();
      member = found[0];
      first_row = found[1];
      rest = found[2];
    }
    at.rows = FindRowTile<kKeys>(p_, member, first_row);
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
    int member = at->rows.member, row = at->rows.first_row;
    NextRowTile(&member, &row);
    at->rows = FindRowTile<kKeys>(p_, member, row);
  }

 private:
  // Moves on to the next tile of rows.
  __device__ __forceinline__ void NextRowTile(int* member, int* first_row) const {
    *first_row += p_.rows;
    if (*first_row < p_.row_tiles * p_.rows) return;
    *first_row = 0;
    ++*member;
  }

  // Calls visit(member, first row, KV tiles of all its key heads) for this thread's tiles of rows,
  // until it returns false. Where all are alike, the first one is every thread's.
  template <typename Visit>
  __device__ __forceinline__ void VisitOwn(Visit visit) const {
    int member = 0, first_row = 0, count = 1;
    if (!p_.alike) {
      const int row_tiles = p_.batch * p_.row_tiles;
      const int each = (row_tiles + kThreads - 1) / kThreads;
      const int first = static_cast<int>(threadIdx.x) * each;
      count = min(each, row_tiles - first);
      member = first / p_.row_tiles;
      first_row = (first - member * p_.row_tiles) * p_.rows;
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int tiles = FindRowTile<kKeys>(p_, member, first_row).tiles * p_.num_kv_heads;
      if (!visit(member, first_row, tiles)) return;
      NextRowTile(&member, &first_row);
    }
  }

  // The sum over all threads, and over those before this one.
  __device__ __forceinline__ static int SumUp(int own, int* before) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    __shared__ int of_warps[kThreads / 32];
    if (lane == 31) of_warps[warp] = sum;
    __syncthreads();
    int total = 0;
    *before = sum - own;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) {
      if (i < warp) *before += of_warps[i];
      total += of_warps[i];
    }
    return total;
  }

  const ShareParams& p_;
  int total_, share_, left_;  // KV tiles; of each CTA; how many CTAs have one more
  // KV tiles of this thread's tiles of rows, and before them; where all are alike, of one member.
  int own_, before_;
};

// Where a CTA puts a piece that is not whole: its first piece goes first.
__device__ __forceinline__ int PieceSlot(int cta, bool first) { return 2 * cta + (first ? 0 : 1); }

}  // namespace kvblock
