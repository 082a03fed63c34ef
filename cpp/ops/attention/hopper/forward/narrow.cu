// Hopper's forward kernel in 8 bits, for both padded head dims.
#include "ops/attention/hopper/forward/launch.cuh"

namespace kvblock::hopper {

template const char* LaunchNarrowOf<E4m3, 64>(const AttentionCall&, cudaStream_t);
template const char* LaunchNarrowOf<E4m3, 128>(const AttentionCall&, cudaStream_t);
template const char* LaunchNarrowOf<Int8, 64>(const AttentionCall&, cudaStream_t);
template const char* LaunchNarrowOf<Int8, 128>(const AttentionCall&, cudaStream_t);

}  // namespace kvblock::hopper
