// libkvblock's attention for the emulator: the functions of kvblock/attention.h with the generic
// kernels behind them, from the sources that nvcc compiles. Of Hopper's kernels there are those of
// paged attention, where they are asked for.
namespace emulator {
// Whether decode rows of few keys have a kernel of their own, or are left to the others.
inline bool takes_short = true;
}  // namespace emulator
#define KVBLOCK_TAKES_SHORT emulator::takes_short

#include "ops/attention/generic/backward/launch.cuh"
#include "ops/attention/generic/forward/launch.cuh"
#include "ops/attention/generic/paged/launch.cuh"
#include "ops/attention/generic/split/launch.cuh"
#include "ops/attention/hopper/backward/launcher.h"
#include "ops/attention/hopper/forward/launcher.h"
#include "ops/attention/hopper/paged/launch.cuh"
// The instances follow from their use.
#include "ops/attention/attention_cuda.cu"
#include "ops/attention/generic/backward/backward.cu"
#include "ops/attention/generic/forward/forward.cu"
#include "ops/attention/generic/paged/paged.cu"
#include "ops/attention/generic/split/split.cu"
#include "ops/attention/hopper/paged/narrow.cu"
#include "ops/attention/paged_cuda.cu"
#include "tensor_maps.h"

namespace kvblock::generic {
const char* LaunchLatent(const kvblock_paged_attention&, cudaStream_t) {
  return "not emulated here, but by latent.cc";
}
const char* LaunchOtherLatent(const kvblock_paged_attention& a, const ComputeShares&,
                              cudaStream_t stream) {
  return LaunchLatent(a, stream);
}
}  // namespace kvblock::generic

namespace kvblock::hopper {

bool ServesLatent(const kvblock_paged_attention&, int32_t, LatentMaps*) { return false; }
cudaError_t LaunchLatentShares(const PagedParams&, const LatentMaps&, unsigned, cudaStream_t) {
  return cudaSuccess;
}

namespace {
bool serves_paged = false;
}

const char* LaunchForward(const AttentionCall&, cudaStream_t) { return "not emulated"; }
const char* LaunchBackwardKv(const AttentionCall&, cudaStream_t) { return "not emulated"; }

bool ServesPaged(const kvblock_paged_attention& a) {
  return serves_paged && (a.cache_dtype == a.dtype || a.narrow_queries) && a.scale > 0.0f &&
         a.softcap < kLargeSoftcap;
}
const char* LaunchPaged(const kvblock_paged_attention& a, bool follows, cudaStream_t stream) {
  const auto fits = [&](int d, int v) { return a.head_dim <= d && a.value_dim <= v; };
  if (a.narrow_queries) {
    return fits(64, 64) ? LaunchNarrowPagedOf<64>(a, follows, stream)
                        : LaunchNarrowPagedOf<128>(a, follows, stream);
  }
#if KVBLOCK_CHECK_RACES  // with two places for Q, and with one
  if (a.softcap > 0.0f) return "the race checker has no softcap";
  using Narrow = ForwardTraits<__nv_bfloat16, 64, 64, ForwardKind::kPaged>;
  using Wide = ForwardTraits<__half, 256, 256, ForwardKind::kPaged>;
  return fits(64, 64) && a.dtype == KVBLOCK_BF16 ? LaunchPagedAs<Narrow>(a, follows, stream)
                                                 : LaunchPagedAs<Wide>(a, follows, stream);
#else
  if (a.dtype == KVBLOCK_F16) {
    return fits(64, 64) ? LaunchPagedOf<__half, 64, 64>(a, follows, stream)
                        : LaunchPagedOf<__half, 256, 256>(a, follows, stream);
  }
  if (fits(64, 64)) return LaunchPagedOf<__nv_bfloat16, 64, 64>(a, follows, stream);
  return LaunchPagedOf<__nv_bfloat16, 128, 128>(a, follows, stream);
#endif
}

}  // namespace kvblock::hopper

// Whether Hopper's kernels serve paged attention from now on.
extern "C" void emulator_set_hopper(int serves) { kvblock::hopper::serves_paged = serves != 0; }

// Whether its tensor maps can be of blocks.
extern "C" void emulator_set_block_maps(int can) { kvblock::hopper::takes_blocks = can != 0; }

// Paged attention without the sequences that have more than few packed rows.
extern "C" const char* emulator_paged_attention_of_few(const kvblock_paged_attention* a) {
  if (const char* error = kvblock_paged_attention_check(a)) return error;
  const kvblock::generic::Follower nobody = [](const kvblock_paged_attention&,
                                               cudaStream_t) -> const char* { return nullptr; };
  return kvblock::generic::LaunchPaged(*a, nobody, nullptr);
}

// How many launches there have been since this was asked before.
extern "C" int emulator_launches() { return std::exchange(emulator::launches, 0); }

extern "C" void emulator_set_short(int takes) { emulator::takes_short = takes != 0; }

// How many CTAs of Hopper's kernel there have been since this was asked before.
extern "C" int emulator_hopper_ctas() { return std::exchange(emulator::hopper_ctas, 0); }

// Whether all CTAs run on the first multiprocessor, one after the other.
extern "C" void emulator_set_on_one(int one) { emulator::on_one_multiprocessor = one != 0; }

// Launches from now on are for a GPU of so many multiprocessors, at most 63.
extern "C" void emulator_set_multiprocessors(int count) {
  emulator::device = emulator::kFirst + count;
}
extern "C" void emulator_set_multiprocessor_bytes(int bytes) {
  emulator::multiprocessor_bytes = bytes;
}
// Bit n: a launch since this was asked before had n CTAs in x, n up to 30.
extern "C" int emulator_grids() { return std::exchange(emulator::grids, 0); }
