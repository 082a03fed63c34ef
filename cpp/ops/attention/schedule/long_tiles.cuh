// The tiles of queries of the sequences that have many rows, as a warp finds them. Lengths lie on
// the device: nobody else knows how many tiles there are.
#pragma once

#include <cstdint>

#include "ops/attention/schedule/ragged.cuh"

namespace kvblock {

// All lanes call its functions together. A tile has `queries` queries of one sequence.
class LongTiles {
 public:
  __device__ __forceinline__ LongTiles(const RaggedParams& p, int queries)
      : p_(p), queries_(queries) {}

  // How many there are; none where query_start falls.
  __device__ __forceinline__ int Count() const {
    int count = 0;
    bool fallen = false;
#pragma unroll 4
    for (int member = threadIdx.x % 32; member < p_.batch; member += 32) {
      const int rows = Rows(member);
      fallen = fallen || rows < 0;
      count += Tiles(rows);
    }
    count = __reduce_add_sync(~0u, count);
    return __any_sync(~0u, fallen) ? 0 : count;
  }

  // Into how many pieces each tile's keys are to be shared out, of `items` that there are, so that
  // there are `most` at the most: as many as give each multiprocessor one, but none of few KV tiles
  // of kKeys. Sums are of whole numbers, so all CTAs find the same.
  template <int kKeys>
  __device__ __forceinline__ int Pieces(int items, int most) const {
    constexpr int kLeastTiles = 4;
    const int pieces = items > 0 ? most / items : 0;
    if (pieces < 2) return 1;
    int longest = 0;
#pragma unroll 1
    for (int member = threadIdx.x % 32; member < p_.batch; member += 32) {
      const Sequence s = MemberSequence(p_, member);
      if (s.q_rows <= 0 || !IsLong(p_, s.q_rows)) continue;
      int first, end;
      s.VisibleKeys(max(s.q_rows - queries_, 0), s.q_rows, &first, &end);
      longest = max(longest, end - first);
    }
    longest = __reduce_max_sync(~0u, longest);
    return Between(longest / (kKeys * kLeastTiles), 1, pieces);
  }

  // Finds tile number `nth` of those that there are, counted from the last one of the last member:
  // under a causal mask the last ones of a sequence are the longest. Who asks for higher numbers
  // later is told sooner.
  __device__ __forceinline__ void Find(int nth, int* member, int* tile) {
    if (nth < before_) base_ = before_ = 0;
    for (;; base_ += 32) {
      const int own = p_.batch - 1 - base_ - static_cast<int>(threadIdx.x % 32);
      const int tiles = own >= 0 ? Tiles(Rows(own)) : 0;
      int up_to = tiles;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, up_to, step);
        if (static_cast<int>(threadIdx.x % 32) >= step) up_to += other;
      }
      const unsigned passed = __ballot_sync(~0u, before_ + up_to > nth);
      if (passed != 0 || base_ >= p_.batch) {
        const int owner = passed != 0 ? __ffs(passed) - 1 : 0;
        *member = __shfl_sync(~0u, own, owner);
        *tile = before_ + __shfl_sync(~0u, up_to, owner) - 1 - nth;
        return;
      }
      before_ += __shfl_sync(~0u, up_to, 31);
    }
  }

 private:
  __device__ __forceinline__ int Rows(int member) const {
    const int call = static_cast<int>(p_.by_sequences(static_cast<uint32_t>(member)));
    int first, end;
    FindRows(p_, call, member - call * static_cast<int>(p_.by_sequences.d), &first, &end);
    return end - first;
  }
  __device__ __forceinline__ int Tiles(int rows) const {
    return IsLong(p_, rows) ? (rows + queries_ - 1) / queries_ : 0;
  }

  const RaggedParams& p_;
  const int queries_;
  int base_ = 0, before_ = 0;  // where the last search ended: members, and the tiles of these
};

}  // namespace kvblock
