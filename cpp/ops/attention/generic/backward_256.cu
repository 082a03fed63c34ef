// The backward kernels for head dims up to 256, in a file of their own so that they compile in
// parallel.
#include "ops/attention/generic/backward_launch.cuh"

namespace kvblock {

template const char* LaunchBackwardKv<256>(const kvblock_attention&, cudaStream_t);
template const char* LaunchBackwardQ<256>(const kvblock_attention&, cudaStream_t);
template const char* LaunchBackwardBias<256>(const kvblock_attention&, cudaStream_t);

}  // namespace kvblock
