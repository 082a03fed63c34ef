// Launching attention over latent caches where another kernel computes the shares: all else is as
// for the kernel here, also who puts pieces together.
#pragma once

#include <cstdint>

#include "ops/attention/generic/latent/launcher.h"
#include "ops/attention/generic/paged/launch.cuh"

namespace kvblock::generic {

// Of units of so many rows and tiles of 64 keys, and one CTA to a multiprocessor.
template <typename T_, int kRows_>
struct OtherLatentTraits {
  using T = T_;
  using Params = PagedParams;
  struct Keys {
    using Members = RaggedParams;
  };
  static constexpr SplitShape kSplit = {64, 2, 1, 12};
  static constexpr int kRows = kRows_, kTileKeys = kSplit.keys;
  static constexpr int kSharedBytes = 0;  // that kernel's own affair
  static constexpr bool kWide = false, kCombines = true;
};
template <int kPieceCtas_>
struct OtherShares {
  static constexpr int kPieceCtas = kPieceCtas_;
  const ComputeShares& compute;
  static cudaError_t Prepare() { return cudaSuccess; }
  const char* Launch(const PagedParams& p, unsigned shares, cudaStream_t stream) const {
    return CudaResult(compute(p, shares, stream));
  }
};

template <typename T>
const char* LaunchOtherLatentOf(const kvblock_paged_attention& a, const ComputeShares& compute,
                                cudaStream_t stream) {
  using Half = OtherLatentTraits<T, 32>;
  using Whole = OtherLatentTraits<T, 64>;
  using Paired = OtherLatentTraits<T, kPairedRows>;
  Gpu gpu{};
  if (const char* error = AskGpu(&gpu)) return error;
  const OtherShares<1> alone = {compute};
  const OtherShares<2> by_two = {compute};
  if (PagedTileRows(a) == 32) return LaunchPagedAs<Half, Half>(a, nullptr, stream, alone);
  return PagedPairsTiles(a) && gpu.multiprocessors > 1
             ? LaunchPagedAs<Paired, Paired>(a, nullptr, stream, by_two)
             : LaunchPagedAs<Whole, Whole>(a, nullptr, stream, alone);
}

}  // namespace kvblock::generic
