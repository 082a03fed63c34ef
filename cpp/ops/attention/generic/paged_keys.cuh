// Keys and values in the blocks of a cache, found through block tables.
//
// A thread looks up one key of the tile that is to be loaded next: its block's id is on the way
// while the tile before is computed. Then it leaves block and slot in shared memory for those who
// copy the row, and a warp its keys' bits: 1 where there is one.
#pragma once

#include <cstdint>

#include "device/cp_async.cuh"
#include "ops/attention/generic/tile.cuh"
#include "ops/attention/schedule/pages.cuh"
#include "ops/attention/schedule/shares.cuh"

namespace kvblock::generic {

template <typename Traits>
class PagedKeys {
 public:
  using Params = PagedParams;
  using Members = RaggedParams;
  static constexpr bool kLooksUp = true;

  // Where a thread's key lies; block -1: there is none.
  struct Found : PagedKey {
    int kv_head, layer;  // of its scales
  };

  // Of this thread's first sequence. Until code for it has come, lengths have, too.
  __device__ __forceinline__ static void Prefetch(const Params& p) {
    const int member =
        static_cast<int>(threadIdx.x) * ((p.batch + Traits::kThreads - 1) / Traits::kThreads);
    if (member >= p.batch) return;
    PrefetchToL2(p.kv_lens + member);
    if (p.query_start != nullptr) PrefetchToL2(p.query_start + member);
  }

  __device__ __forceinline__ explicit PagedKeys(const Params& p)
      : p_(p), layer_(FindLayer(p, 0)), policy_(ReadOnce()) {}

  // All threads; those beyond the keys of a tile have nothing to do.
  __device__ __forceinline__ Found LookUp(const Place& at) const {
    const int key = FirstKeyOf<kKeys, Params>(at) + static_cast<int>(threadIdx.x);
    const bool wanted = threadIdx.x < kKeys && key >= at.rows.first_key && key < at.rows.end_key;
    const PagedLayer layer = LayerOf(at.rows.member);
    const PagedKey none = {-1, 0};
    return {wanted && layer.there ? FindKey(p_, at.rows.member, key) : none, at.kv_head,
            layer.number};
  }

  // For the tile of this number; between two barriers of all threads.
  __device__ __forceinline__ void Settle(Found found, int tile) const {
    if (threadIdx.x >= kKeys) return;
    const bool there = HasBlock(p_, found);
    const Row none = {kNowhere, kNowhere};
    rows()[tile % kRowRing][threadIdx.x] =
        there ? Row{PageRow(p_.k_strides, found), PageRow(p_.v_strides, found)} : none;
    if constexpr (Traits::kNarrow) {
      CopyScale(p_.k_scale, there, found, scales()[tile % kBitRing].k);
      CopyScale(p_.v_scale, there, found, scales()[tile % kBitRing].v);
    }
    const uint32_t word = __ballot_sync(~0u, there);
    if (threadIdx.x % 32 == 0) bits()[tile % kBitRing][threadIdx.x / 32] = word;
  }

  // The tile of this number, settled, of a place; of keys alone without kValues.
  template <bool kValues = true>
  __device__ __forceinline__ void Load(const Place& at, int tile, uint32_t k_tile,
                                       uint32_t v_tile) const {
    const PagedLayer layer = LayerOf(at.rows.member);
    // As LoadTileAsync shares out a tile.
    constexpr int kLanes = KvTile::kLanes, kStep = Traits::kThreads / kLanes;
    static_assert(kStep % 8 == 0);
    const int row = threadIdx.x / kLanes, chunk = threadIdx.x % kLanes;
    const uint32_t to = KvTile::ChunkOffset(row, chunk);
    const auto bytes = [&](uint32_t units) { return static_cast<uint64_t>(units) * p_.unit; };
    const uint32_t kv_head = static_cast<uint32_t>(at.kv_head);
    const char* const k = layer.k + bytes(p_.k_strides.head * kv_head) + chunk * 16;
    const char* const v = layer.v + bytes(p_.v_strides.head * kv_head) + chunk * 16;
    constexpr int kSteps = kKeys / kStep, kAhead = kSteps < 4 ? kSteps : 4;  // rows at a time
#pragma unroll
    for (int first = 0; first < kSteps; first += kAhead) {
      Row from[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        from[i] = rows()[tile % kRowRing][row + (first + i) * kStep];
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const bool there = from[i].k != kNowhere;
        const char *const k_row = k + bytes(from[i].k), *const v_row = v + bytes(from[i].v);
#pragma unroll
        for (int c = 0; c < KvTile::kRowBytes / 16; c += kLanes) {
          const uint32_t place = to + (first + i) * kStep * KvTile::kRowBytes + c * 16;
          const int column = (c + chunk) * KvTile::kColumnsOfChunk;
          CopyAsync16(k_tile + place, k_row + c * 16, there && column < p_.head_dim, policy_);
          if constexpr (kValues) {
            CopyAsync16(v_tile + place, v_row + c * 16, there && column < p_.value_dim, policy_);
          }
        }
      }
    }
  }

  // Of the tile of this number: its keys from `first` on, a multiple of 16, as many as a warp has.
  __device__ __forceinline__ bool AllThere(int tile, int first) const {
    constexpr int kOwn = Traits::kKeys;
    const uint32_t* const words = bits()[tile % kBitRing];
    if constexpr (kOwn < 32) {
      return (~(words[first / 32] >> (first % 32)) & ((1u << kOwn) - 1)) == 0;
    } else {
      bool all = true;
#pragma unroll
      for (int i = 0; i < kOwn / 32; ++i) all = all && words[first / 32 + i] == ~0u;
      return all;
    }
  }
  __device__ __forceinline__ bool There(int tile, int key) const {
    return (bits()[tile % kBitRing][key / 32] >> (key % 32) & 1) != 0;
  }

  // The scales of the keys and values of a tile, where each has one; they arrive with it.
  struct Scales {
    float k[Traits::kTileKeys], v[Traits::kTileKeys];
  };
  __device__ __forceinline__ const Scales& ScalesOf(int tile) const {
    return scales()[tile % kBitRing];
  }
  // The one of a KV head, where keys have none of their own.
  __device__ __forceinline__ static float ScaleOfHead(const ScaleStrides& scale, int kv_head) {
    return scale.data == nullptr || scale.each ? 1.0f : __ldg(scale.data + scale.head * kv_head);
  }

 private:
  // The layer of a member's call.
  __device__ __forceinline__ PagedLayer LayerOf(int member) const {
    return p_.layer_batch > 1 ? FindLayer(p_, static_cast<int>(p_.by_sequences(member))) : layer_;
  }

  using KvTile = typename Traits::KvTile;
  static constexpr int kKeys = Traits::kTileKeys;
  static_assert(kKeys % 32 == 0 && kKeys <= Traits::kThreads);
  // A tile is settled one step before it is loaded, and its bits are read until it is computed.
  static constexpr int kRowRing = 2, kBitRing = Traits::kStages < 4 ? 4 : 8;
  static_assert(kBitRing > Traits::kStages);

  // Of a key and its value, in units, from where their layer and head begin.
  struct Row {
    uint32_t k, v;
  };
  static constexpr uint32_t kNowhere = UINT32_MAX;
  __device__ __forceinline__ static auto& rows() {
    __shared__ Row rows[kRowRing][kKeys];
    return rows;
  }
  __device__ __forceinline__ void CopyScale(const ScaleStrides& scale, bool there, Found found,
                                            float* to) const {
    if (!scale.each) return;
    const float* const from = scale.data + found.layer * scale.layer + found.block * scale.block +
                              found.slot * scale.token + found.kv_head * scale.head;
    CopyAsync<4>(to + threadIdx.x, there ? from : nullptr);
  }
  __device__ __forceinline__ static auto& scales() {
    __shared__ Scales scales[kBitRing];
    return scales;
  }
  __device__ __forceinline__ static auto& bits() {
    __shared__ uint32_t bits[kBitRing][kKeys / 32];
    return bits;
  }

  const Params& p_;
  const PagedLayer layer_;
  const uint64_t policy_;
};

}  // namespace kvblock::generic
