// libkvblock's norms in 8 bits for the emulator: the function of kvblock/norm_cast.h with the
// kernel behind it, from the sources that nvcc compiles.
#define KVBLOCK_EMULATES_CLUSTERS 1
#include "ops/cast/norm_cast_cuda.cu"

namespace {
[[maybe_unused]] const int kMajor = emulator::major = 9;
}  // namespace

// Whether launches from now on are for Hopper.
extern "C" void emulator_set_hopper(int hopper) { emulator::major = hopper != 0 ? 9 : 8; }
// CTAs of clusters since this was asked before.
extern "C" int emulator_clustered_ctas() { return std::exchange(emulator::clustered_ctas, 0); }
