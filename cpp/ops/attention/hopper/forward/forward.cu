// Picks the instance of Hopper's forward kernel.
#include <algorithm>

#include "device/widen.cuh"
#include "ops/attention/contract/instances.h"
#include "ops/attention/hopper/forward/launcher.h"

namespace kvblock::hopper {

const char* LaunchForward(const AttentionCall& a, cudaStream_t stream) {
  const int dim = a.head_dim, value_dim = a.value_dim;
  const auto launch = [&](auto instance) {
    using In = decltype(instance);
    return LaunchForwardOf<typename In::Type, In::kDim, In::kValue>(a, stream);
  };
  const bool small = std::max(dim, value_dim) <= 64;
  if (a.dtype == KVBLOCK_E4M3) {
    return small ? LaunchNarrowOf<E4m3, 64>(a, stream) : LaunchNarrowOf<E4m3, 128>(a, stream);
  }
  if (a.dtype == KVBLOCK_I8) {
    return small ? LaunchNarrowOf<Int8, 64>(a, stream) : LaunchNarrowOf<Int8, 128>(a, stream);
  }
  const auto fits = [&](int d, int v) { return dim <= d && value_dim <= v; };
  if (fits(64, 64)) return ForType<64, 64>(a, launch);
  if (fits(96, 96)) return ForType<96, 96>(a, launch);
  if (fits(128, 128)) return ForType<128, 128>(a, launch);
  if (fits(192, 128)) return ForType<192, 128>(a, launch);
  if (fits(192, 192)) return ForType<192, 192>(a, launch);
  return ForType<256, 256>(a, launch);
}

}  // namespace kvblock::hopper
