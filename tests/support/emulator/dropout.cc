// libkvblock's attention with dropout for the emulator: Hopper's forward kernel of that kind, with
// two places for Q and with one, behind the function of kvblock/attention.h. A library of its own,
// beside attention.cc, which has the generic kernels.
#define KVBLOCK_EMULATES_CLUSTERS 1
#include "ops/attention/hopper/forward/launch.cuh"
// Everything else is emulated elsewhere, or not at all.
#include "ops/attention/attention_cuda.cu"
#include "tensor_maps.h"

namespace kvblock::generic {
const char* LaunchForward(const AttentionCall&, cudaStream_t) { return "not emulated here"; }
const char* LaunchSplit(const AttentionCall&, cudaStream_t) {
  return "few queries have no dropout";
}
const char* LaunchBackwardKv(const AttentionCall&, cudaStream_t) { return "not emulated here"; }
const char* LaunchBackwardQ(const AttentionCall&, cudaStream_t) { return "not emulated here"; }
const char* LaunchBackwardBias(const AttentionCall&, cudaStream_t) { return "not emulated here"; }
}  // namespace kvblock::generic

namespace kvblock::hopper {
const char* LaunchBackwardKv(const AttentionCall&, cudaStream_t) { return "not emulated"; }
const char* LaunchForward(const AttentionCall& a, cudaStream_t stream) {
  if (KindOf(a) != ForwardKind::kDropped) return "dropout alone is emulated here";
  using Narrow = ForwardTraits<__nv_bfloat16, 64, 64, ForwardKind::kDropped>;
  using Wide = ForwardTraits<__half, 256, 256, ForwardKind::kDropped>;
  return a.dtype == KVBLOCK_BF16 ? LaunchForwardAs<Narrow>(a, stream)
                                 : LaunchForwardAs<Wide>(a, stream);
}
}  // namespace kvblock::hopper

// Launches from now on are for a GPU of so many multiprocessors, at most 63.
extern "C" void emulator_set_multiprocessors(int count) {
  emulator::device = emulator::kFirst + count;
}
