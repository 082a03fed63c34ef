// Query rows that are computed together: the queries of all heads that share a key head, one query
// after the other, so that a tile of K and V that is read once serves them all.
#pragma once

#include <cstdint>

#include "ops/attention/contract/params.cuh"
#include "ops/attention/mask/sequence.cuh"

namespace kvblock {

// Row r is query r / group of head kv_head * group + r % group.
struct PackedRows {
  int kv_head, group, count;

  __device__ __forceinline__ PackedRows(const AttentionParams& p, int kv_head)
      : kv_head(kv_head), group(p.group), count(static_cast<int>(p.q_len) * p.group) {}
  __device__ __forceinline__ int Query(int row) const { return row / group; }
  __device__ __forceinline__ int Head(int row) const { return kv_head * group + row % group; }

  // The index of a row in q or o, [B, T, N, ...].
  __device__ __forceinline__ int64_t Index(const AttentionParams& p, const Sequence& s,
                                           int row) const {
    return (s.q_row + Query(row)) * p.num_heads + Head(row);
  }
};

}  // namespace kvblock
