// How the KV tiles of a launch are shared out among CTAs, evenly, whatever the lengths are.
//
// A unit is a tile of query rows of one batch member and key head; its work is the KV tiles that
// some of its rows can see. Tiles of units lie in lines: members in order, for each its tiles of
// rows, for each of these some key heads. There are `lines` of them, all alike: line l has the key
// heads l, l + lines, ... CTA c of a line's `ctas` takes the tiles
//
//   [Begin(c), Begin(c + 1)),   Begin(c) = total * c / ctas
//
// Lines run side by side, so that the heads of a token, which are neighbours in memory, are read at
// about the same time: memory is faster then.
//
// so a unit may be cut between CTAs, anywhere. What a CTA has of one unit is a piece. A piece that
// is the whole unit is a result; of the others, which are the first or the last of their CTA, a
// CTA has two places for what they come to, and combine.cuh puts those of a unit together.
//
// With a `split` units are cut at multiples of so many of their tiles, and nowhere else: a piece is
// the CTA's in whose share its first tile is. Then what is added up in which order depends on the
// unit alone. Each piece that is not the whole unit has a place of its own, by where it begins.
//
// Lengths lie on the device. Every CTA counts the tiles of all members for itself: that takes
// neither a launch nor memory, and for a batch up to its threads a load or two each.
#pragma once

#include <cstdint>

#include "device/fast_div.cuh"
#include "ops/attention/contract/params.cuh"
#include "ops/attention/mask/sequence.cuh"

namespace kvblock {

constexpr int32_t kNoSplit = INT32_MAX;

struct ShareParams : AttentionParams {
  static constexpr bool kSameRows = true;  // all members have q_len rows
  int32_t lines, heads;                    // of a line, its key heads
  FastDiv by_lines;
  int32_t ctas;           // of a line
  uint32_t ctas_inverse;  // 2^32 / ctas, rounded up
  int32_t rows;           // of a tile
  FastDiv by_group;
  bool alike;     // all units have as many KV tiles; of members that have as many rows
  int32_t split;  // tiles of a piece, where units are cut at multiples of these; else kNoSplit
  // Of the launch that combines: whether its CTAs are numbered by units, and how many threads
  // share out the pieces of a row: 1, 2, 4 or 8.
  bool combine_units;
  int32_t joining;
  // What pieces come to, with two places for each CTA of the launch: [.., rows, value_dim], and the
  // log2 of their sums, [.., rows].
  float* piece_o;
  float* piece_lse;
  int32_t* piece_there;  // [..], not 0: it is there
};

// A packed row's query (packed_rows.cuh).
__device__ __forceinline__ int QueryOf(const ShareParams& p, int row) {
  return static_cast<int>(p.by_group(static_cast<uint32_t>(row)));
}

// The sequence of a batch member. Few queries are never packed.
__device__ __forceinline__ Sequence MemberSequence(const ShareParams& p, int member) {
  return MakeSequence<false, false>(p, member);
}
__device__ __forceinline__ int64_t LseIndex(const ShareParams& p, const Sequence& s, int query,
                                            int head) {
  return s.LseRow(p, head) + query;
}

// How many packed rows of a member are in the line.
__device__ __forceinline__ int LineRows(const ShareParams& p, const Sequence& s) {
  return s.q_rows * p.group;
}

// A tile of rows of one member, all of whose key heads see the same.
struct RowTile {
  int member, first_row;  // of the packed rows
  // Its KV tiles are whole: the first one has first_key, which ragged sequences' rows see as the
  // first, and where they see no more there is the end; of others first_key is where it begins.
  int first_key, tiles, end_key;
  int sequence;  // Line::SequenceOf has it
};

// The keys that some query of [q0, q1) may attend to.
__device__ __forceinline__ void VisibleKeys(const ShareParams&, const Sequence& s, int q0, int q1,
                                            int* first, int* end) {
  s.VisibleKeys(q0, q1, first, end);
}

template <int kKeys, typename Params>
__device__ __forceinline__ RowTile FindRowTile(const Params& p, const Sequence& s, int first_row) {
  const int last_row = min(first_row + p.rows, s.q_rows * p.group) - 1;
  int begin, end;
  VisibleKeys(p, s, QueryOf(p, first_row), QueryOf(p, last_row) + 1, &begin, &end);
  // A unit that sees nothing has a tile, too, or nobody would write its rows.
  const bool some = begin < end;
  const unsigned first_key = some ? static_cast<unsigned>(begin) / kKeys * kKeys : 0;
  const unsigned tiles = some ? (static_cast<unsigned>(end) - first_key + kKeys - 1) / kKeys : 1;
  if constexpr (Params::kSameRows) {
    return {s.batch, first_row, static_cast<int>(first_key), static_cast<int>(tiles), s.kv_len, 0};
  } else {
    return {s.batch, first_row, some ? begin : 0, static_cast<int>(tiles), some ? end : 0, 0};
  }
}

// A place in the line: KV tile `tile` of key head `kv_head` of a tile of rows.
struct Place {
  int kv_head, tile;
  RowTile rows;
};

// The first key of a place's tile.
template <int kKeys, typename Params>
__device__ __forceinline__ int FirstKeyOf(const Place& at) {
  unsigned first = at.rows.first_key;
  if (!Params::kSameRows) first = first / kKeys * kKeys;
  return static_cast<int>(first) + at.tile * kKeys;
}

// A line, as the threads of one CTA count it. All of them call its functions together. Params are
// ShareParams, or what has a MemberSequence of its own (ragged.cuh). kRemembers: where a thread
// counts one tile of rows alone, it keeps what it knows of it until a share is found, and does not
// look again.
template <int kKeys, int kThreads, typename Params = ShareParams, bool kRemembers = false>
class Line {
 public:
  // `number`: which of the lines.
  __device__ __forceinline__ Line(const Params& p, int number) : p_(p), number_(number) {
    static_assert(kThreads % 32 == 0 && kThreads <= 1024);
    own_ = Scan(INT32_MAX, nullptr, kRemembers ? &known_ : nullptr);
    before_ = 0;
    total_ = Alike() ? own_ * p.batch : SumUp(own_, &before_);
    ctas_ = p.ctas;
    inverse_ = p.ctas_inverse;
    ShareOut();
  }

  // Shares for fewer CTAs than there are: those of higher numbers have none.
  __device__ __forceinline__ void SetCtas(int ctas) {
    ctas_ = ctas;
    inverse_ = static_cast<uint32_t>(((uint64_t{1} << 32) + ctas - 1) / ctas);
    ShareOut();
  }
  // Which of the lines, all of which have the same tiles.
  __device__ __forceinline__ void SetNumber(int number) { number_ = number; }
  __device__ __forceinline__ int ctas() const { return Params::kSameRows ? p_.ctas : ctas_; }

  __device__ __forceinline__ int total() const {
    return Params::kSameRows ? total_ : max(total_, 0);
  }
  // A member has less than no rows, and so nobody has any.
  __device__ __forceinline__ bool fallen() const { return !Params::kSameRows && total_ < 0; }
  // total = share ctas + left, so it is share c + left c / ctas. kMostCtas squared times kMostCtas
  // is less than 2^32: then a product with the inverse is the quotient.
  __device__ __forceinline__ int Begin(int cta) const {
    if (!Params::kSameRows && cta >= ctas_) return total();
    const uint32_t inverse = Params::kSameRows ? p_.ctas_inverse : inverse_;
    return share_ * cta + static_cast<int>(__umulhi(left_ * cta, inverse));
  }
  // The CTA that has a tile: the last one that begins at it or before.
  __device__ __forceinline__ int Owner(int tile) const {
    const float per_tile = __fdividef(static_cast<float>(ctas()), static_cast<float>(total()));
    int cta = min(static_cast<int>(static_cast<float>(tile) * per_tile), ctas() - 1);
    while (Begin(cta) > tile) --cta;
    while (cta + 1 < ctas() && Begin(cta + 1) <= tile) ++cta;
    return cta;
  }

  // The tiles of a CTA, *begin .. *end, and where the first one is, if there are any. With a split
  // both ends are those of pieces: the first that begins there or after. All threads.
  __device__ __forceinline__ void FindShare(int cta, int* begin, int* end, Place* at) {
    const bool splits = !Params::kSameRows && p_.split != kNoSplit;
    *begin = Begin(cta);
    *end = Begin(cta + 1);
    // Code for a search is far away when a launch begins: there is one copy of it.
    enum : int { kEnd, kBegin, kPlace };
#pragma unroll 1
    for (int step = splits ? kEnd : kPlace; step <= kPlace; ++step) {
      const int tile = step == kEnd ? *end : *begin;
      if (tile >= (step == kPlace ? *end : total())) continue;
      *at = Find(tile);
      if (step == kPlace) break;
      const int past = at->tile % p_.split;
      const int more = past > 0 ? min(p_.split - past, at->rows.tiles - at->tile) : 0;
      *end += step == kEnd ? more : 0;
      *begin += step == kBegin ? more : 0;
    }
    known_ = {};  // registers are dear from here on
  }
  // The place of a piece that is not a whole unit: where in the line it begins, and whether the
  // unit begins with it. Of those that begin within `split` tiles one does at the most, and one
  // does not, since their units are longer.
  __device__ __forceinline__ unsigned SplitSlot(int begin, bool first) const {
    return (static_cast<unsigned>(begin / p_.split) * 2 + (first ? 1 : 0)) * p_.lines + number_;
  }

  // The first tile of a unit; of one that does not exist, the total or more.
  __device__ __forceinline__ int FirstOf(int unit) const {
    if (Alike()) return own_ / p_.heads * unit;
    const int index = unit / p_.heads, head = unit - index * p_.heads;
    int tile_of_rows = FirstOwnTileOfRows(), before = before_;
    __shared__ int found;
    __syncthreads();
    if (threadIdx.x == 0) found = total();
    __syncthreads();
    for (int member = FirstMember(); member < EndMember(); ++member) {
      const Sequence s = MemberSequence(p_, member);
      for (int row = 0; row < LineRows(p_, s); row += p_.rows) {
        const int tiles = FindRowTile<kKeys>(p_, s, row).tiles;
        if (tile_of_rows++ == index) found = before + tiles * head;
        before += tiles * p_.heads;
      }
    }
    __syncthreads();
    return found;
  }

  // The sequence of a place that all threads moved to by Find or Next, once they have met since. As
  // many places as kSequences are known.
  static constexpr int kSequences = 16;
  __device__ __forceinline__ const Sequence& SequenceOf(const Place& at) const {
    return sequences()[at.rows.sequence];
  }

  // Finds a tile that exists.
  __device__ __forceinline__ Place Find(int tile) const {
    __shared__ Place found;
    if (Alike()) {
      Place at;
      const int member = tile / own_;
      const Sequence s = MemberSequence(p_, member);
      if (threadIdx.x == 0) sequences()[0] = s;
      at.rows = FindRowTile<kKeys>(p_, s, 0);
      SetTile(tile - member * own_, &at);
      return at;
    }
    __syncthreads();  // of an earlier search, all have read it
    if (tile >= before_ && tile < before_ + own_) {
      if (kRemembers && known_.count == 1) {
        found.rows = known_.rows;
        sequences()[0] = known_.sequence;
        SetTile(tile - before_, &found);
      } else {
        Scan(tile - before_, &found);
      }
    }
    __syncthreads();
    return found;
  }

  // Moves on by a tile, of which there is one.
  __device__ __forceinline__ void Next(Place* at) const {
    if (++at->tile < at->rows.tiles) return;
    at->tile = 0;
    at->kv_head += p_.lines;
    if (at->kv_head < p_.num_kv_heads) return;
    at->kv_head = number_;
    int member = at->rows.member, row = at->rows.first_row + p_.rows;
#pragma unroll 1
    for (;; ++member, row = 0) {
      const Sequence s = MemberSequence(p_, member);
      if (row >= LineRows(p_, s)) continue;
      const int place = (at->rows.sequence + 1) % kSequences;
      if (threadIdx.x == 0) sequences()[place] = s;
      at->rows = FindRowTile<kKeys>(p_, s, row);
      at->rows.sequence = place;
      return;
    }
  }

 private:
  // The last tile of rows that a thread has counted, and how many it has.
  struct Known {
    Sequence sequence{};
    RowTile rows{};
    int count = 0;
  };

  __device__ __forceinline__ bool Alike() const { return Params::kSameRows && p_.alike; }
  __device__ __forceinline__ int MembersOfThread() const {
    return (p_.batch + kThreads - 1) / kThreads;
  }
  __device__ __forceinline__ int FirstMember() const {
    return static_cast<int>(threadIdx.x) * MembersOfThread();
  }
  __device__ __forceinline__ int EndMember() const {
    return min(FirstMember() + MembersOfThread(), p_.batch);
  }

  __device__ __forceinline__ void SetTile(int tile, Place* at) const {
    const int head = p_.heads == 1 ? 0 : tile / at->rows.tiles;
    at->kv_head = head * p_.lines + number_;
    at->tile = tile - head * at->rows.tiles;
  }

  // Counts the KV tiles of all of this thread's tiles of rows and key heads, or looks for tile
  // number `wanted` of them. Where all are alike, the first member's are every thread's. kNoLine: a
  // member has less than no rows, and so the line has no tiles.
  __device__ __forceinline__ int Scan(int wanted, Place* found, Known* known = nullptr) const {
    int count = 0, member = Alike() ? 0 : FirstMember();
    const int end = Alike() ? 1 : EndMember();
#pragma unroll 1
    for (; member < end; ++member) {
      const Sequence s = MemberSequence(p_, member);
      if (!Params::kSameRows && s.q_rows < 0) return kNoLine;
#pragma unroll 1
      for (int row = 0; row < LineRows(p_, s); row += p_.rows) {
        const RowTile rows = FindRowTile<kKeys>(p_, s, row);
        count += rows.tiles * p_.heads;
        if (known != nullptr) *known = {s, rows, known->count + 1};
        if (count <= wanted) continue;
        found->rows = rows;
        sequences()[0] = s;
        SetTile(wanted - (count - rows.tiles * p_.heads), found);
        return count;
      }
    }
    return count;
  }

  __device__ __forceinline__ static auto& sequences() {
    __shared__ Sequence sequences[kSequences];
    return sequences;
  }

  __device__ __forceinline__ int TilesOfRows(const Sequence& s) const {
    return (LineRows(p_, s) + p_.rows - 1) / p_.rows;
  }
  // How many tiles of rows the members before this thread's have.
  __device__ __forceinline__ int FirstOwnTileOfRows() const {
    if (Params::kSameRows) return FirstMember() * TilesOfRows(MemberSequence(p_, 0));
    int own = 0, before = 0;
    __syncthreads();  // of an earlier sum, all have read it
    for (int member = FirstMember(); member < EndMember(); ++member) {
      own += TilesOfRows(MemberSequence(p_, member));
    }
    SumUp(own, &before);
    return before;
  }

  __device__ __forceinline__ void ShareOut() {
    share_ = static_cast<unsigned>(total()) / static_cast<unsigned>(ctas());
    left_ = total() - share_ * ctas();
  }

  static constexpr int kNoLine = INT32_MIN;

  // The sum over all threads, and over those before this one; kNoLine if one has it.
  __device__ __forceinline__ static int SumUp(int own, int* before) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    __shared__ int of_warps[kThreads / 32];
    if (!Params::kSameRows && __any_sync(~0u, own == kNoLine)) sum = kNoLine;
    if (lane == 31) of_warps[warp] = sum;
    __syncthreads();
    int total = 0;
    bool none = false;
    *before = sum - own;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) {
      if (i < warp) *before += of_warps[i];
      total += of_warps[i];
      none = none || of_warps[i] == kNoLine;
    }
    return !Params::kSameRows && none ? kNoLine : total;
  }

  const Params& p_;
  int number_;
  int total_, share_, left_;  // KV tiles; of each CTA; how many CTAs have one more
  int ctas_;                  // that have shares
  uint32_t inverse_;          // 2^32 / ctas_, rounded up
  // KV tiles of this thread's tiles of rows, and before them; where all are alike, of one member.
  int own_, before_;
  Known known_;
};

// Where a CTA of the launch puts a piece that is not whole: its first piece goes first.
__device__ __forceinline__ int PieceSlot(int cta, bool first) { return 2 * cta + (first ? 0 : 1); }

}  // namespace kvblock
