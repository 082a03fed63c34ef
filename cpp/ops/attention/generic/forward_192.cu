// The forward kernels for head dims up to 192, in a file of their own so that they compile in
// parallel.
#include "ops/attention/generic/forward_launch.cuh"

template const char* kvblock::LaunchForward<192>(const kvblock_attention&, cudaStream_t);
