// Picks the instance of Hopper's paged attention kernels.
#include <algorithm>

#include "host/attention_call.h"
#include "ops/attention/contract/instances.h"
#include "ops/attention/contract/params.cuh"
#include "ops/attention/hopper/current_gpu.h"
#include "ops/attention/hopper/paged/launcher.h"

namespace kvblock::hopper {

bool ServesPaged(const kvblock_paged_attention& a) {
  if (a.cache_dtype != a.dtype && !a.narrow_queries) return false;
  return OnHopper() && a.scale > 0.0f && a.softcap < kLargeSoftcap;
}

const char* LaunchPaged(const kvblock_paged_attention& a, bool follows, cudaStream_t stream) {
  if (a.narrow_queries) {
    return std::max(a.head_dim, a.value_dim) <= 64 ? LaunchNarrowPagedOf<64>(a, follows, stream)
                                                   : LaunchNarrowPagedOf<128>(a, follows, stream);
  }
  AttentionCall call{};
  call.dtype = a.dtype;
  const auto launch = [&](auto instance) {
    using In = decltype(instance);
    return LaunchPagedOf<typename In::Type, In::kDim, In::kValue>(a, follows, stream);
  };
  const auto fits = [&](int d, int v) { return a.head_dim <= d && a.value_dim <= v; };
  if (fits(64, 64)) return ForType<64, 64>(call, launch);
  if (fits(96, 96)) return ForType<96, 96>(call, launch);
  if (fits(128, 128)) return ForType<128, 128>(call, launch);
  if (fits(192, 128)) return ForType<192, 128>(call, launch);
  if (fits(192, 192)) return ForType<192, 192>(call, launch);
  return ForType<256, 256>(call, launch);
}

}  // namespace kvblock::hopper
