// What of libkvblock chooses tiles, for the emulator: the functions of kvblock/select.h with the
// kernels behind them, from the sources that nvcc compiles.
#include "ops/select/select_cuda.cu"
#include "ops/select/weigh_cuda.cu"

// Launches since this was asked before.
extern "C" int emulator_launches() { return std::exchange(emulator::launches, 0); }
