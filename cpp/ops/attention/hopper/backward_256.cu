// The Hopper backward kernel for head dims up to 256, in a file of its own so that the instances
// compile side by side.
#include "ops/attention/hopper/backward_launch.cuh"

namespace kvblock::hopper {

template const char* LaunchBackwardKvOf<256, 256>(const kvblock_attention&, cudaStream_t);

}  // namespace kvblock::hopper
