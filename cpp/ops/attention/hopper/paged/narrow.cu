// Hopper's paged attention in 8 bits, for both padded head dims, and what comes in front of it.
#include <algorithm>

#include "ops/attention/hopper/paged/launch.cuh"

namespace kvblock::hopper {

template const char* LaunchNarrowPagedOf<64>(const kvblock_paged_attention&, bool, cudaStream_t);
template const char* LaunchNarrowPagedOf<128>(const kvblock_paged_attention&, bool, cudaStream_t);

const char* PrepareNarrowPaged(const kvblock_paged_attention& a, cudaStream_t stream) {
  // Tiles are alike for both.
  return PrepareNarrowPagedAs<ForwardTraits<E4m3, 128, 128, ForwardKind::kPaged>>(a, stream);
}

}  // namespace kvblock::hopper
