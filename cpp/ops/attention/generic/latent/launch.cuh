// Launching attention over latent caches: as paged attention, by the same lines and pieces.
#pragma once

#include <cstdint>

#include "host/paged_call.h"
#include "ops/attention/generic/latent/kernel.cuh"
#include "ops/attention/generic/latent/launcher.h"
#include "ops/attention/generic/paged/launch.cuh"

namespace kvblock::generic {

template <typename T, int kDim, int kValue, int kRowBlocks>
const char* LaunchLatentAs(const kvblock_paged_attention& a, cudaStream_t stream) {
  using Large = LatentTraits<T, kDim, kValue, kRowBlocks, false>;
  using Compact = LatentTraits<T, kDim, kValue, kRowBlocks, true>;
  constexpr int kBesides = 8192;  // bytes of a CTA: its own variables, and what the driver keeps
  Gpu gpu{};
  if (const char* error = AskGpu(&gpu)) return error;
  if (Large::kSharedBytes + kBesides <= gpu.cta_shared) {
    return LaunchPagedAs<Large, Large>(a, nullptr, stream);
  }
  if constexpr (Compact::kSharedBytes < Large::kSharedBytes) {
    if (Compact::kSharedBytes + kBesides <= gpu.cta_shared) {
      return LaunchPagedAs<Compact, Compact>(a, nullptr, stream);
    }
  }
  return "paged_attention: a latent cache of head dim 576 needs 152 KiB of shared memory for a "
         "thread block, as compute capability 8.0, 9.0 and 10.0 have";
}

template <typename T, int kDim, int kValue>
const char* LaunchLatentOf(const kvblock_paged_attention& a, cudaStream_t stream) {
  switch (PagedTileRows(a)) {
    case 16: return LaunchLatentAs<T, kDim, kValue, 1>(a, stream);
    case 32: return LaunchLatentAs<T, kDim, kValue, 2>(a, stream);
    default: return LaunchLatentAs<T, kDim, kValue, 4>(a, stream);
  }
}

}  // namespace kvblock::generic
