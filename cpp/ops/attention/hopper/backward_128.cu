#include "ops/attention/hopper/backward_launch.cuh"

namespace kvblock::hopper {

template const char* LaunchBackwardKvOf<128>(const kvblock_attention&, cudaStream_t);

}  // namespace kvblock::hopper
