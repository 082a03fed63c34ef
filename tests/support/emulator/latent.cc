// Paged attention over latent caches for the emulator: a library of its own, beside attention.cc,
// so that who changes one compiles one.
#define KVBLOCK_EMULATES_CLUSTERS 1
#include "ops/attention/generic/latent/launch.cuh"
#include "ops/attention/hopper/latent/launch.cuh"
#include "ops/attention/hopper/paged/launcher.h"
// The instances follow from their use.
#include "ops/attention/generic/latent/latent.cu"
#include "ops/attention/hopper/latent/latent.cu"
#include "ops/attention/paged_cuda.cu"
#include "tensor_maps.h"

namespace kvblock::generic {
const char* LaunchPaged(const kvblock_paged_attention&, Follower, cudaStream_t) {
  return "not emulated here, but by attention.cc";
}
}  // namespace kvblock::generic

namespace kvblock::hopper {
bool ServesPaged(const kvblock_paged_attention&) { return true; }  // it is not to be asked
const char* LaunchPaged(const kvblock_paged_attention&, bool, cudaStream_t) {
  return "not emulated here, but by attention.cc";
}
const char* PrepareNarrowPaged(const kvblock_paged_attention&, cudaStream_t) {
  return "not emulated here, but by attention.cc";
}
}  // namespace kvblock::hopper

// Launches from now on are for a GPU of so many multiprocessors, at most 63, whose CTAs can have so
// many bytes of shared memory.
extern "C" void emulator_set_multiprocessors(int count) {
  emulator::device = emulator::kFirst + count;
}
// Whether it is Hopper.
extern "C" void emulator_set_hopper(int hopper) { emulator::major = hopper != 0 ? 9 : 8; }
// CTAs of its own kernels since this was asked before.
extern "C" int emulator_hopper_ctas() { return std::exchange(emulator::hopper_ctas, 0); }
// Those of clusters.
extern "C" int emulator_clustered_ctas() { return std::exchange(emulator::clustered_ctas, 0); }
extern "C" void emulator_set_cta_bytes(int bytes) { emulator::cta_bytes = bytes; }
