// libkvblock's attention in 8 bits for the emulator: Hopper's forward kernel and the transposition
// of V, behind the function of kvblock/attention.h. A library of its own, beside attention.cc.
#define KVBLOCK_EMULATES_CLUSTERS 1
#include <algorithm>

#include "ops/attention/hopper/forward/launch.cuh"
// Everything else is emulated elsewhere, or not at all.
#include "ops/attention/attention_cuda.cu"
#include "tensor_maps.h"

namespace kvblock::generic {
const char* LaunchForward(const AttentionCall&, cudaStream_t) { return "not of 8 bits"; }
const char* LaunchSplit(const AttentionCall&, cudaStream_t) { return "not of 8 bits"; }
const char* LaunchBackwardKv(const AttentionCall&, cudaStream_t) { return "not of 8 bits"; }
const char* LaunchBackwardQ(const AttentionCall&, cudaStream_t) { return "not of 8 bits"; }
const char* LaunchBackwardBias(const AttentionCall&, cudaStream_t) { return "not of 8 bits"; }
}  // namespace kvblock::generic

namespace kvblock::hopper {
const char* LaunchBackwardKv(const AttentionCall&, cudaStream_t) { return "not of 8 bits"; }
const char* LaunchForward(const AttentionCall& a, cudaStream_t stream) {
  if (!IsNarrow(a)) return "8 bits alone are emulated here";
  const bool integers = a.dtype == KVBLOCK_I8;
  if (std::max(a.head_dim, a.value_dim) <= 64) {
    return integers ? LaunchNarrowOf<Int8, 64>(a, stream) : LaunchNarrowOf<E4m3, 64>(a, stream);
  }
#if KVBLOCK_CHECK_RACES
  return "the race checker has head dims up to 64";
#else
  return integers ? LaunchNarrowOf<Int8, 128>(a, stream) : LaunchNarrowOf<E4m3, 128>(a, stream);
#endif
}
}  // namespace kvblock::hopper

// Launches from now on are for a GPU of so many multiprocessors, at most 63.
extern "C" void emulator_set_multiprocessors(int count) {
  emulator::device = emulator::kFirst + count;
}
// Tiles of which some thread's rows asked for references, times threads, since this was asked
// before.
extern "C" int emulator_references() { return std::exchange(emulator::square_roots, 0) / 2; }
// CTAs of Hopper's kernel, and of clusters, since this was asked before.
extern "C" int emulator_hopper_ctas() { return std::exchange(emulator::hopper_ctas, 0); }
extern "C" int emulator_clustered_ctas() { return std::exchange(emulator::clustered_ctas, 0); }
