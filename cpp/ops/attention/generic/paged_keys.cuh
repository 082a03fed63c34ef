// Keys and values in the blocks of a cache, found through block tables.
//
// A thread looks up a key of the tile that is to be loaded next: its block's id is on the way while
// the tile before is loaded or computed. Then it leaves where the row lies in shared memory for
// those who copy it, and a warp its keys' bits: 1 where there is one.
//
// All threads of a CTA do so, or some warps that do nothing else (Traits::kLoaders,
// split/loader.cuh). Of these each copies the rows that it has looked up itself.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/cp_async.cuh"
#include "ops/attention/generic/tile.cuh"
#include "ops/attention/schedule/pages.cuh"
#include "ops/attention/schedule/shares.cuh"

namespace kvblock::generic {

template <typename Traits>
class PagedKeys {
 public:
  // Traits ask for these, so they come before what asks Traits.
  using Params = PagedParams;
  using Members = RaggedParams;
  static constexpr bool kLooksUp = true;

 private:
  // Who looks up and copies: some warps, which are a CTA's first, or all threads.
  static constexpr bool kLoads = Traits::kLoaders > 0;
  static constexpr int kLoadThreads = kLoads ? Traits::kLoaders * 32 : Traits::kThreads;
  static constexpr int kLoadWarps = kLoadThreads / 32, kKeys = Traits::kTileKeys;
  static constexpr int kOwn = kKeys > kLoadThreads ? kKeys / kLoadThreads : 1;
  static_assert(kKeys % 32 == 0 && kKeys <= kLoadThreads * kOwn);

 public:
  // Where a thread's keys lie; block -1: there is none.
  struct Found {
    PagedKey at[kOwn];
    int member, kv_head;
  };

  // Of this thread's first sequence. Until code for it has come, lengths have, too.
  __device__ __forceinline__ static void Prefetch(const Params& p) {
    const int member =
        static_cast<int>(threadIdx.x) * ((p.batch + Traits::kThreads - 1) / Traits::kThreads);
    if (member >= p.batch) return;
    PrefetchToL2(p.kv_lens + member);
    if (p.query_start != nullptr) PrefetchToL2(p.query_start + member);
  }

  __device__ __forceinline__ explicit PagedKeys(const Params& p) : p_(p), policy_(ReadOnce()) {
    if constexpr (!kLoads) PrepareToLoad();
  }

  // Warps that load do so when the first ids are on their way.
  __device__ __forceinline__ void PrepareToLoad() { layer_ = FindLayer(p_, 0); }

  // All threads that load; those beyond the keys of a tile have nothing to do.
  __device__ __forceinline__ Found LookUp(const Place& at) const {
    const int32_t* const table = FindTable(p_, at.rows.member);
    Found found = {{}, at.rows.member, at.kv_head};
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int key = FirstKeyOf<kKeys, Params>(at) + OwnKey(i);
      const bool wanted = HasKeys() && key >= at.rows.first_key && key < at.rows.end_key;
      const PagedKey none = {-1, 0};
      found.at[i] = wanted ? FindKey(p_, table, key) : none;
    }
    return found;
  }

  // For the tile of this number; between two barriers of those who load. Returns whether all keys
  // of this warp are there.
  __device__ __forceinline__ bool Settle(const Found& found, int tile) const {
    if (!HasKeys()) return false;
    bool whole = true;
    const PagedLayer layer = LayerOf(found.member);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const PagedKey& at = found.at[i];
      const int key = OwnKey(i);
      const bool there = layer.there && HasBlock(p_, at);
      const Row none = {kNowhere, kNowhere};
      rows()[tile % kRowRing][key] =
          there ? Row{PageRow(p_.k_strides, at), PageRow(p_.v_strides, at)} : none;
      if constexpr (Traits::kNarrow) {
        float *const k = scales()[tile % kBitRing].k, *const v = scales()[tile % kBitRing].v;
        CopyScale(p_.k_scale, layer, found.kv_head, at, there, k + key);
        CopyScale(p_.v_scale, layer, found.kv_head, at, there, v + key);
      }
      const uint32_t word = __ballot_sync(~0u, there);
      if (threadIdx.x % 32 == 0) bits()[tile % kBitRing][LoadWarp() * kOwn + i] = word;
      whole = whole && word == ~0u;
    }
    return whole;
  }

  // The tile of this number, settled, of a member's KV head; of keys alone without kValues. Where
  // some warps only load, they tell what Settle has returned: nearly all tiles are whole, and need
  // few instructions, which is what one warp can do at the speed of memory.
  template <bool kValues = true>
  __device__ __forceinline__ void Load(int member, int kv_head, int tile, uint32_t k_tile,
                                       uint32_t v_tile, bool whole = false) const {
    const PagedLayer layer = LayerOf(member);
    // As LoadTileAsync shares out a tile. Where rows of a thread differ in their swizzle, it has a
    // place for each swizzle.
    constexpr int kLanes = KvTile::kLanes, kTogether = kLoads ? 32 : kLoadThreads;
    constexpr int kStep = kTogether / kLanes, kSwizzles = kStep < 8 ? 8 / kStep : 1;
    constexpr int kRows = kLoads ? kKeys / kLoadWarps : kKeys, kSteps = kRows / kStep;
    static_assert(kStep * kSwizzles % 8 == 0);
    const unsigned thread = threadIdx.x % kTogether, chunk = thread % kLanes;
    const unsigned own_rows = kLoads ? LoadWarp() * kRows : 0, row = thread / kLanes;
    uint32_t to[kSwizzles];
#pragma unroll
    for (int i = 0; i < kSwizzles; ++i) {
      to[i] =
          KvTile::ChunkOffset(row + i * kStep, chunk) + (own_rows - i * kStep) * KvTile::kRowBytes;
    }
    const auto bytes = [&](uint32_t units) { return static_cast<uint64_t>(units) * p_.unit; };
    const char* const k = layer.k + bytes(p_.k_strides.head * kv_head) + chunk * 16;
    const char* const v = layer.v + bytes(p_.v_strides.head * kv_head) + chunk * 16;
    // Rows at a time. A warp that only loads has many, and one copy of the code for them.
    constexpr int kBytes = KvTile::kRowBytes;
    constexpr int kAtOnce = !kLoads        ? 4
                            : kBytes > 256 ? 2
                            : kBytes > 128 ? 4
                            : kBytes > 64  ? 8
                                           : 16;
    constexpr int kAhead = kSteps < kAtOnce ? kSteps : kAtOnce, kUnroll = kLoads ? 1 : kSteps;
    static_assert(kSteps % kAhead == 0 && kAhead % kSwizzles == 0);
    const auto copy = [&](auto all) {
      constexpr bool kAll = decltype(all)::value;
#pragma unroll kUnroll
      for (int first = 0; first < kSteps; first += kAhead) {
        Row from[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          from[i] = rows()[tile % kRowRing][own_rows + row + (first + i) * kStep];
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const bool there = kAll || from[i].k != kNowhere;
          const char* const k_row = StepFrom(k, from[i].k, p_.unit);
          const char* const v_row = StepFrom(v, from[i].v, p_.unit);
#pragma unroll
          for (int c = 0; c < KvTile::kRowBytes / 16; c += kLanes) {
            const uint32_t place =
                to[i % kSwizzles] + (first + i) * kStep * KvTile::kRowBytes + c * 16;
            const int column = static_cast<int>((c + chunk) * KvTile::kColumnsOfChunk);
            CopyAsync16(k_tile + place, k_row + c * 16, kAll || (there && column < p_.head_dim),
                        policy_);
            if constexpr (kValues) {
              CopyAsync16(v_tile + place, v_row + c * 16, kAll || (there && column < p_.value_dim),
                          policy_);
            }
          }
        }
      }
    };
    if constexpr (kLoads) {
      if (whole && p_.head_dim == Traits::kDim && p_.value_dim == Traits::kDim) {
        return copy(std::true_type());
      }
    }
    copy(std::false_type());
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
  // A tile is settled one step before it is loaded, and its bits are read until it is computed.
  static constexpr int kRowRing = 2, kBitRing = Traits::kStages < 4 ? 4 : 8;
  static_assert(kBitRing > Traits::kStages);

  // A warp's keys follow each other.
  __device__ __forceinline__ static int OwnKey(int i) {
    const unsigned lane = threadIdx.x % 32;
    return static_cast<int>(LoadWarp() * 32 * kOwn + i * 32 + lane);
  }
  __device__ __forceinline__ static unsigned LoadWarp() {
    return kLoadWarps == 1 ? 0 : threadIdx.x / 32;
  }
  __device__ __forceinline__ static bool HasKeys() {
    return kLoadThreads <= kKeys || threadIdx.x < kKeys;
  }

  // Of a key and its value, in units, from where their layer and head begin.
  struct Row {
    uint32_t k, v;
  };
  static constexpr uint32_t kNowhere = UINT32_MAX;
  __device__ __forceinline__ static auto& rows() {
    __shared__ Row rows[kRowRing][kKeys];
    return rows;
  }
  __device__ __forceinline__ void CopyScale(const ScaleStrides& scale, const PagedLayer& layer,
                                            int kv_head, const PagedKey& at, bool there,
                                            float* to) const {
    if (!scale.each) return;
    const float* const from = scale.data + layer.number * scale.layer + at.block * scale.block +
                              at.slot * scale.token + kv_head * scale.head;
    CopyAsync<4>(to, there ? from : nullptr);
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
  PagedLayer layer_;  // of the first call
  const uint64_t policy_;
};

}  // namespace kvblock::generic
