// Where the keys and values of a tile come from. A kernel that is written over a source of keys
// asks it for the rows of a tile, and knows nothing of how they lie.
//
// A source is a class over the kernel's Traits: T, KvTile, kTileKeys, kThreads and kLoaders. It has
//
//   Params      what travels to the kernel
//   Members     the part of it that says which sequences there are (shares.cuh)
//   Prefetch    the first thing of a launch: what the device alone knows begins to come near
//   kLooksUp    whether it looks up where a tile lies, one tile ahead of loading it. Then it has
//               LookUp and Settle, and Load takes what they left in shared memory; PrepareToLoad
//               comes before, where some warps only load.
//   Load        starts copying a tile
//   AllThere    whether all of a warp's keys of a tile are there, apart from lengths
//   There       whether one is
#pragma once

#include "device/cp_async.cuh"
#include "ops/attention/contract/params.cuh"
#include "ops/attention/generic/tile.cuh"
#include "ops/attention/mask/sequence.cuh"
#include "ops/attention/schedule/shares.cuh"

namespace kvblock::generic {

// Dense arrays [B, S, K, D].
template <typename Traits>
class DenseKeys {
 public:
  using Params = ShareParams;
  using Members = ShareParams;
  static constexpr bool kLooksUp = false;
  struct Found {};

  __device__ __forceinline__ static void Prefetch(const Params&) {}

  __device__ __forceinline__ explicit DenseKeys(const Params& p) : p_(p), policy_(ReadOnce()) {}

  // The tile of a place, to K's and V's tiles in shared memory. Keys past the end are zeros, and
  // are not read.
  __device__ __forceinline__ void Load(const Place& at, int, uint32_t k_tile,
                                       uint32_t v_tile) const {
    using T = typename Traits::T;
    const int member = at.rows.member;
    const int first = at.rows.first_key + at.tile * Traits::kTileKeys;
    const HeadRows k =
        RowsOfHead<T>(p_.k, member * p_.kv_len, p_.num_kv_heads, at.kv_head, p_.head_dim);
    const HeadRows v =
        RowsOfHead<T>(p_.v, member * p_.kv_len, p_.num_kv_heads, at.kv_head, p_.value_dim);
    using Tile = typename Traits::KvTile;
    LoadTileAsync<Tile, Traits::kThreads>(k_tile, k, first, at.rows.end_key, threadIdx.x, policy_);
    LoadTileAsync<Tile, Traits::kThreads>(v_tile, v, first, at.rows.end_key, threadIdx.x, policy_);
  }

  __device__ __forceinline__ bool AllThere(int, int) const { return true; }
  __device__ __forceinline__ bool There(int, int) const { return true; }

 private:
  const Params& p_;
  const uint64_t policy_;
};

}  // namespace kvblock::generic
