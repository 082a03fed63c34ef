// libkvblock's attention of float32 for the emulator: the functions of kvblock/attention.h with the
// generic forward and backward kernels behind them. A library of its own, which compiles beside
// that of attention.cc.
#define KVBLOCK_EMULATES_FLOAT32 1

#include "ops/attention/generic/backward/launch.cuh"
#include "ops/attention/generic/forward/launch.cuh"
#include "ops/attention/generic/split/launcher.h"
#include "ops/attention/hopper/backward/launcher.h"
#include "ops/attention/hopper/forward/launcher.h"
// The instances follow from their use.
#include "ops/attention/attention_cuda.cu"
#include "ops/attention/generic/backward/backward.cu"
#include "ops/attention/generic/forward/forward.cu"

namespace kvblock::generic {
const char* LaunchSplit(const AttentionCall&, cudaStream_t) { return "not of float32"; }
}  // namespace kvblock::generic

namespace kvblock::hopper {
const char* LaunchForward(const AttentionCall&, cudaStream_t) { return "not emulated"; }
const char* LaunchBackwardKv(const AttentionCall&, cudaStream_t) { return "not emulated"; }
}  // namespace kvblock::hopper

// What a CTA can have of shared memory from now on: with less there is one stage instead of two.
extern "C" void emulator_set_cta_bytes(int bytes) { emulator::cta_bytes = bytes; }
extern "C" void emulator_set_multiprocessors(int count) {
  emulator::device = emulator::kFirst + count;
}
