// Query rows that are computed together: the queries of all heads that share a key head, one query
// after the other, so that a tile of K and V that is read once serves them all.
#pragma once

#include <cstdint>

#include "ops/attention/mask/sequence.cuh"
#include "ops/attention/schedule/shares.cuh"

namespace kvblock {

// Row r is query r / group of head kv_head * group + r % group.
class PackedRows {
 public:
  __device__ __forceinline__ PackedRows(const ShareParams& p, int kv_head, int queries)
      : p_(p), kv_head_(kv_head), count_(queries * p.group) {}

  __device__ __forceinline__ int count() const { return count_; }
  __device__ __forceinline__ int Query(int row) const { return QueryOf(p_, row); }
  __device__ __forceinline__ int Head(int row) const {
    return kv_head_ * p_.group + row - Query(row) * p_.group;
  }

  // The index of a row in q or o, [B, T, N, ...].
  __device__ __forceinline__ int64_t Index(const Sequence& s, int row) const {
    return (s.q_row + Query(row)) * p_.num_heads + Head(row);
  }

 private:
  const ShareParams& p_;
  int kv_head_, count_;
};

}  // namespace kvblock
