// Where the keys and values of a tile come from. A kernel that is written over a source of keys
// asks it for the rows of a tile, and knows nothing of how they lie.
#pragma once

#include "ops/attention/contract/params.cuh"
#include "ops/attention/generic/tile.cuh"
#include "ops/attention/mask/sequence.cuh"

namespace kvblock::generic {

// Dense arrays [B, S, K, D].
template <typename T>
class DenseKeys {
 public:
  __device__ __forceinline__ DenseKeys(const AttentionParams& p, int member, int kv_head)
      : k_(RowsOfHead<T>(p.k, member * p.kv_len, p.num_kv_heads, kv_head, p.head_dim)),
        v_(RowsOfHead<T>(p.v, member * p.kv_len, p.num_kv_heads, kv_head, p.value_dim)) {}

  // Starts copying the keys [first, first + Tile::kRows) and their values; keys from `end` on are
  // zeros, and are not read.
  template <typename Tile, int kThreads>
  __device__ __forceinline__ void Load(uint32_t k_tile, uint32_t v_tile, int first, int end,
                                       int thread) const {
    LoadTileAsync<Tile, kThreads>(k_tile, k_, first, end, thread);
    LoadTileAsync<Tile, kThreads>(v_tile, v_, first, end, thread);
  }

 private:
  HeadRows k_, v_;
};

}  // namespace kvblock::generic
