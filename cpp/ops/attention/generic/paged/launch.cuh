// Launching paged attention: the kernel for few queries, over keys in blocks. Sequences with many
// queries have many tiles of rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "host/paged_call.h"
#include "ops/attention/generic/paged/launcher.h"
#include "ops/attention/generic/paged/params.cuh"
#include "ops/attention/generic/paged/short.cuh"
#include "ops/attention/generic/paged_keys.cuh"
#include "ops/attention/generic/split/launch.cuh"

namespace kvblock::generic {

// Units are cut at multiples of so many tiles, and their pieces put together in one order, whatever
// else the call has.
inline void SetSplit(const kvblock_paged_attention& a, int32_t tiles, PagedParams* p) {
  p->split = tiles;
  p->combine_units = true;
  p->joining = 4;
  p->piece_lse = p->piece_o + PagedSplitPlaces(a, p->rows) * p->rows * a.value_dim;
  p->piece_there = nullptr;
}

// Shares beside the launch that takes the other sequences, if there is one.
template <typename Shares>
struct FollowedShares {
  const Shares& shares;
  const kvblock_paged_attention& a;
  Follower follower;
  static cudaError_t Prepare() { return Shares::Prepare(); }
  const char* Launch(const PagedParams& p, unsigned ctas, cudaStream_t stream) const {
    if (const char* error = shares.Launch(p, ctas, stream)) return error;
    return follower ? follower(a, stream) : nullptr;
  }
};

// Wide: one with wide CTAs, or the same. Shares: another kernel for those of Traits.
template <typename Traits, typename Wide, typename Shares = SplitShares<Traits>>
const char* LaunchPagedAs(const kvblock_paged_attention& a, Follower follower, cudaStream_t stream,
                          const Shares& shares = {}) {
  Gpu gpu{};
  if (const char* error = AskGpu(&gpu)) return error;
  if (Traits::kSharedBytes > gpu.cta_shared) {
    return "paged_attention: head dims beyond 192 need 130 KiB of shared memory for a thread "
           "block, as compute capability 8.0, 9.0 and 10.0 have";
  }
  const int32_t most_rows = follower ? PagedFewRows(a) : INT32_MAX;
  const int64_t keys = PagedKeysOfTable(a);
  const int64_t tiles = TilesOfUnit(keys, Traits::kTileKeys);
  // How long sequences are is known to the GPU alone. It costs little to cut as if all were alike,
  // and often they are.
  const SplitWork work = {
      Traits::kRows, std::min<int64_t>(PagedMeanRows(a, most_rows), Traits::kRows),
      PagedTilesOfRows(a, Traits::kRows, most_rows) * a.num_kv_heads, true, false};
  if (const char* error = CheckTiles(work, tiles)) return error;
  const auto launch = [&](auto traits, Cut cut) {
    using Own = decltype(traits);
    cut.ctas = std::max(cut.ctas, 1);
    PagedParams p = MakePagedParams(a, work, cut, most_rows);
    if constexpr (std::is_same_v<Own, Traits>) p.piece_ctas = Shares::kPieceCtas;
    if (a.split_size > 0) {
      static_assert(KVBLOCK_PAGED_SPLIT % Own::kTileKeys == 0);
      const int64_t split = PagedSplitKeys(a) / Own::kTileKeys;
      cut.combines = tiles > split;
      SetSplit(a, static_cast<int32_t>(std::min<int64_t>(split, kNoSplit - 1)), &p);
    }
    if (follower) {
      PagedCounters* const counters = CountersOf(a);
      p.sharing = counters->sharing;
      p.multiprocessors = gpu.multiprocessors;
      if (a.split_size == 0) p.piece_there = counters->piece_there;
      cut.combines = cut.combines || a.split_size == 0;
      const cudaError_t status = cudaMemsetAsync(counters, 0, sizeof(PagedCounters), stream);
      if (status != cudaSuccess) return CudaResult(status);
    }
    const auto launch_with = [&](const auto& own) {
      using Own_ = std::decay_t<decltype(own)>;
      return LaunchPieces<Own>(p, work, cut, gpu, stream, FollowedShares<Own_>{own, a, follower});
    };
    if constexpr (std::is_same_v<Own, Traits>) {
      return launch_with(shares);
    } else {
      return launch_with(SplitShares<Own>());
    }
  };
  // A wide CTA each, for about as many units as there are multiprocessors.
  if constexpr (Wide::kWide) {
    const int64_t units = work.units, most = gpu.multiprocessors;
    if (a.split_size == 0 && units <= most && units * 100 >= most * 90 &&
        Wide::kSharedBytes <= gpu.cta_shared) {
      const int64_t wide_tiles = TilesOfUnit(keys, Wide::kTileKeys);
      return launch(Wide(), CutFor(work, a.num_kv_heads, wide_tiles, most));
    }
  }
  const int64_t places = PlacesFor<Traits>(gpu) / Shares::kPieceCtas;
  return launch(Traits(), CutFor(work, a.num_kv_heads, tiles, places));
}

// Warps of a CTA that only load. Two where a multiprocessor has one CTA, and at D 128 where decode
// rows may have kLongKeys: a tile comes sooner in two halves, which gains 1 % of a long step and
// costs a short one as much; at D 64 it costs 1 %. With them a thread has 168 registers, not 255:
// too few at D 192. At D 256, where a multiprocessor has six warps, it has 255 in any case. Over
// caches of 8 bits, whose tiles have twice the keys to look up, they take 10 to 25 % longer.
constexpr int LoadersOf(int dim, bool many = false) {
  return dim == 192 ? 0 : many || dim == 256 ? 2 : 1;
}
constexpr int64_t kLongKeys = 4096;

// Decode rows of few keys, each by a CTA for each key head; false: they are for others. Tests may
// leave them to the others.
#ifndef KVBLOCK_TAKES_SHORT
#define KVBLOCK_TAKES_SHORT true
#endif
template <typename T, int kDim>
bool LaunchIfShort(const kvblock_paged_attention& a, cudaStream_t stream, const char** error) {
  Gpu gpu{};
  if ((*error = AskGpu(&gpu))) return true;
  const auto launch = [&](auto traits) {
    using Traits = decltype(traits);
    if (!ServesShort<Traits>(a, gpu)) return false;
    *error = LaunchShort<Traits>(a, gpu, stream);
    return true;
  };
  if (!KVBLOCK_TAKES_SHORT) return false;
  // More warps where a multiprocessor has one CTA.
  if constexpr (kDim == 64) {
    return launch(ShortTraits<T, 64, 8, 1>()) || launch(ShortTraits<T, 64, 4, 3>());
  } else if constexpr (kDim == 128) {
    return launch(ShortTraits<T, 128, 8, 1>()) || launch(ShortTraits<T, 128, 4, 2>());
  } else {
    return false;
  }
}

template <typename T, int kDim, typename Cache>
const char* LaunchPagedOf(const kvblock_paged_attention& a, Follower follower,
                          cudaStream_t stream) {
  const int32_t most_rows = follower ? PagedFewRows(a) : INT32_MAX;
  const int32_t rows = PagedTileRows(a, most_rows);
  if constexpr (std::is_same_v<Cache, T>) {
    constexpr int kLoaders = LoadersOf(kDim);
    using One = SplitTraits<T, kDim, 1, PagedKeys, false, kLoaders>;
    using Two = SplitTraits<T, kDim, 2, PagedKeys, false, kLoaders>;
    using Four = SplitTraits<T, kDim, 4, PagedKeys, false, kLoaders>;
    // Decode rows alone are worth more instances.
    constexpr bool kWide = HasWide(kDim);
    using Wide = SplitTraits<T, kDim, 1, PagedKeys, kWide, LoadersOf(kDim, kWide)>;
    using Long = SplitTraits<T, kDim, 1, PagedKeys, false, LoadersOf(kDim, kDim == 128)>;
    const char* error = nullptr;
    if (!follower && rows == 16 && LaunchIfShort<T, kDim>(a, stream, &error)) return error;
    switch (rows) {
      case 16:
        return PagedKeysOfTable(a) < kLongKeys ? LaunchPagedAs<One, Wide>(a, follower, stream)
                                               : LaunchPagedAs<Long, Wide>(a, follower, stream);
      case 32: return LaunchPagedAs<Two, Two>(a, follower, stream);
      default: return LaunchPagedAs<Four, Four>(a, follower, stream);
    }
  } else {
    using One = NarrowTraits<T, kDim, 1, Cache>;
    using Four = NarrowTraits<T, kDim, 4, Cache>;
    return rows == 16 ? LaunchPagedAs<One, One>(a, follower, stream)
                      : LaunchPagedAs<Four, Four>(a, follower, stream);
  }
}

}  // namespace kvblock::generic
