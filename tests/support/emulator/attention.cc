// libkvblock's attention for the emulator: the functions of kvblock/attention.h with the generic
// kernels behind them, from the sources that nvcc compiles.
#include "ops/attention/generic/backward/launch.cuh"
#include "ops/attention/generic/forward/launch.cuh"
#include "ops/attention/generic/split/launch.cuh"
// The instances follow from their use.
#include "ops/attention/attention_cuda.cu"
#include "ops/attention/generic/backward/backward.cu"
#include "ops/attention/generic/forward/forward.cu"
#include "ops/attention/generic/split/split.cu"
#include "ops/attention/hopper/not_built.cu"

// Launches from now on are for a GPU of so many multiprocessors, at most 63.
extern "C" void emulator_set_multiprocessors(int count) {
  emulator::device = emulator::kFirst + count;
}
extern "C" void emulator_set_multiprocessor_bytes(int bytes) {
  emulator::multiprocessor_bytes = bytes;
}
// Bit n: a launch since this was asked before had n CTAs in x, n up to 30.
extern "C" int emulator_grids() { return std::exchange(emulator::grids, 0); }
