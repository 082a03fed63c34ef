// The Hopper backward kernel for head dims up to 192, in a file of its own so that the instances
// compile side by side.
#include "ops/attention/hopper/backward_launch.cuh"

namespace kvblock::hopper {

template const char* LaunchBackwardKvOf<192, 128>(const kvblock_attention&, cudaStream_t);
template const char* LaunchBackwardKvOf<192, 192>(const kvblock_attention&, cudaStream_t);

}  // namespace kvblock::hopper
