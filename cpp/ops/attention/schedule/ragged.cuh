// Sequences that have different numbers of queries, one after the other in q, and keys that lie in
// blocks (kvblock/paged_attention.h has the rules). They are few queries' members (shares.cuh).
#pragma once

#include <cstdint>

#include "device/fast_div.cuh"
#include "ops/attention/mask/sequence.cuh"
#include "ops/attention/schedule/shares.cuh"

namespace kvblock {

// Of AttentionCall: batch is all sequences of all calls, q_len the rows of a call, and kv_len as
// many keys as a row of the tables has. A window's sides are at most kFar.
struct RaggedParams : ShareParams {
  static constexpr bool kSameRows = false;
  int32_t piece_ctas;  // that compute a piece, some of its rows each: each of them tells of its own
  int32_t calls;
  FastDiv by_sequences, by_rows;  // sequences and rows of a call
  const int32_t* query_start;
  // Of the block tables: entries of a row, keys of a block; or where each sequence's begins, if
  // they lie one after the other.
  int32_t table_width;
  FastDiv block_size;
  const int32_t* table_first;
  // Sequences with more packed rows are not in the line: another launch computes them, beside this
  // one (beside.cuh). It takes their tiles by the counter, which begins with 0, as the words of
  // `sharing` do. NULL: there is no such launch.
  int32_t most_rows;
  unsigned* counter;
  int32_t* sharing;
  int32_t multiprocessors;
  // For each row of q: the keys that it sees, first and end; and bits, tree_words words of them, of
  // those of its sequence's queries that it sees. NULL: all.
  const int32_t* ranges;
  const uint32_t* tree_mask;
  int32_t tree_words;
};

__device__ __forceinline__ int Between(int x, int low, int high) { return min(max(x, low), high); }

// The rows [first, end) of a sequence of a call; end < first where query_start falls. Then the line
// has no tiles at all, and all rows are nobody's.
__device__ __forceinline__ void FindRows(const RaggedParams& p, int call, int sequence, int* first,
                                         int* end) {
  const int rows = static_cast<int>(p.q_len);
  *first = 0;
  *end = rows;
  if (p.query_start != nullptr) {
    const int32_t* const start =
        p.query_start + (static_cast<int64_t>(call) * (p.by_sequences.d + 1) + sequence);
    *first = Between(__ldg(start), 0, rows);
    *end = Between(__ldg(start + 1), 0, rows);
  } else if (p.q_lens != nullptr) {
    *end = Between(__ldg(p.q_lens + call), 0, rows);
  }
}

// Where a member's table begins, if tables lie one after the other.
__device__ __forceinline__ int TableFirst(const RaggedParams& p, int member) {
  return Between(__ldg(p.table_first + member), 0, p.table_width);
}
// Keys that a member's table has room for.
__device__ __forceinline__ int MostKeys(const RaggedParams& p, int member) {
  const int most = static_cast<int>(p.kv_len);
  if (p.table_first == nullptr) return most;
  const int64_t own = int64_t{p.table_width - TableFirst(p, member)} * p.block_size.d;
  return static_cast<int>(min(own, int64_t{most}));
}

// The sequence of a member that has the rows [first, end) of its call.
__device__ __forceinline__ Sequence MakeMember(const RaggedParams& p, int member, int call,
                                               int first, int end, int kv_len) {
  Sequence s;
  s.batch = member;
  s.q_row = call * p.q_len + first;
  s.kv_row = 0;
  s.q_rows = s.q_len = end - first;
  s.kv_rows = s.kv_len = Between(kv_len, 0, MostKeys(p, member));
  // Lengths and windows are so small that no sum overflows.
  const int shift = s.kv_len - s.q_len, left = Opaque(p.window_left);
  const int right = Opaque(p.window_right);
  s.left = left < 0 ? -kFar : Between(shift - left, -kFar, kFar);
  s.right = right < 0 ? kFar : Between(shift + right + 1, -kFar, kFar);
  return s;
}
__device__ __forceinline__ Sequence MemberSequence(const RaggedParams& p, int member) {
  const int kv_len = __ldg(p.kv_lens + member);  // on its way beside the rows
  const int call = static_cast<int>(p.by_sequences(static_cast<uint32_t>(member)));
  int first, end;
  FindRows(p, call, member - call * static_cast<int>(p.by_sequences.d), &first, &end);
  return MakeMember(p, member, call, first, end, kv_len);
}

// The keys of a query's range; there are ranges.
struct KeyRange {
  int first, end;
};
__device__ __forceinline__ KeyRange RangeOf(const RaggedParams& p, const Sequence& s, int query) {
  const int32_t* const range = p.ranges + (s.q_row + query) * 2;
  return {__ldg(range), __ldg(range + 1)};
}

// As Sequence::VisibleKeys. Of a sequence with few queries their ranges are looked at, so that no
// tile is read that they leave out; of others that would take longer than it saves.
__device__ __forceinline__ void VisibleKeys(const RaggedParams& p, const Sequence& s, int q0,
                                            int q1, int* first, int* end) {
  constexpr int kFewQueries = 16;
  s.VisibleKeys(q0, q1, first, end);
  if (p.ranges == nullptr || s.q_rows > kFewQueries) return;
  int low = INT32_MAX, high = 0;
#pragma unroll 1
  for (int query = q0; query < min(q1, s.q_rows); ++query) {
    const KeyRange range = RangeOf(p, s, query);
    if (range.first >= range.end) continue;
    low = min(low, range.first);
    high = max(high, range.end);
  }
  *first = max(*first, low);
  *end = min(*end, high);
}

// Whether a query sees the keys that are its sequence's queries number `first` to `first` + 31, a
// bit each; there is a tree_mask. Below 0 they are earlier keys.
__device__ __forceinline__ uint32_t TreeBits(const RaggedParams& p, const Sequence& s, int query,
                                             int first) {
  const uint32_t* const row = p.tree_mask + (s.q_row + query) * p.tree_words;
  const int word = first >> 5;
  const auto load = [&](int i) { return i < 0 || i >= p.tree_words ? ~0u : __ldg(row + i); };
  return __funnelshift_r(load(word), load(word + 1), first & 31);
}

// Whether a sequence of so many rows is the other launch's.
__device__ __forceinline__ bool IsLong(const RaggedParams& p, int rows) {
  return rows * p.group > p.most_rows;
}
__device__ __forceinline__ int LineRows(const RaggedParams& p, const Sequence& s) {
  return IsLong(p, s.q_rows) ? 0 : s.q_rows * p.group;
}

__device__ __forceinline__ int64_t LseIndex(const RaggedParams& p, const Sequence& s, int query,
                                            int head) {
  return (s.q_row + query) * p.num_heads + head;
}

// Calls write(row of q) with each row of no sequence that is this warp's, which is number `warp` of
// `warps` in its CTA. `all`: they all are nobody's.
template <typename Write>
__device__ __forceinline__ void ForRowsOfNobody(const RaggedParams& p, bool all, int warp,
                                                int warps, Write write) {
  if (p.query_start == nullptr && p.q_lens == nullptr && !all) return;
  const int rows = p.calls * static_cast<int>(p.q_len);
#pragma unroll 1
  for (int i = blockIdx.x * warps + warp; i < rows; i += gridDim.x * warps) {
    const int call = static_cast<int>(p.by_rows(static_cast<uint32_t>(i)));
    const int row = i - call * static_cast<int>(p.q_len);
    int first = 0, end = 0, other;
    if (!all) {
      FindRows(p, call, 0, &first, &other);
      FindRows(p, call, static_cast<int>(p.by_sequences.d) - 1, &other, &end);
    }
    if (row < first || row >= end) write(static_cast<int64_t>(i));
  }
}

}  // namespace kvblock
