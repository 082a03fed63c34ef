// libkvblock's attention for the emulator: Hopper's kernels of 16 bits (sm90_forward.cc,
// sm90_backward.cc) behind the functions of kvblock/attention.h, and the generic kernels that
// serve calls beside them. A library of its own: attention.cc has the generic kernels.
#include "ops/attention/generic/backward/launch.cuh"
// The instances follow from their use.
#include "ops/attention/attention_cuda.cu"
#include "ops/attention/generic/backward/backward.cu"
#include "tensor_maps.h"

namespace kvblock::generic {
const char* LaunchForward(const AttentionCall&, cudaStream_t) { return "not emulated here"; }
const char* LaunchSplit(const AttentionCall&, cudaStream_t) { return "not emulated here"; }
}  // namespace kvblock::generic

// Launches from now on are for a GPU of so many multiprocessors, at most 63.
extern "C" void emulator_set_multiprocessors(int count) {
  emulator::device = emulator::kFirst + count;
}
// CTAs of Hopper's kernels, and of clusters, since this was asked before.
extern "C" int emulator_hopper_ctas() { return std::exchange(emulator::hopper_ctas, 0); }
extern "C" int emulator_clustered_ctas() { return std::exchange(emulator::clustered_ctas, 0); }
