// Hopper's forward kernels of 16 bits for the emulator: see sm90.cc.
#define KVBLOCK_EMULATES_CLUSTERS 1
#include "ops/attention/hopper/forward/launch.cuh"

namespace kvblock::hopper {

const char* LaunchForward(const AttentionCall& a, cudaStream_t stream) {
  const int dim = std::max(a.head_dim, a.value_dim);
  const bool bf16 = a.dtype == KVBLOCK_BF16, f16 = a.dtype == KVBLOCK_F16;
  if (bf16 && dim <= 64) return LaunchForwardOf<__nv_bfloat16, 64, 64>(a, stream);
  if (bf16 && dim <= 128) return LaunchForwardOf<__nv_bfloat16, 128, 128>(a, stream);
  if (f16 && dim > 192) return LaunchForwardOf<__half, 256, 256>(a, stream);
  if (f16 && dim > 128 && a.value_dim <= 128) return LaunchForwardOf<__half, 192, 128>(a, stream);
  if (f16 && dim > 128) return LaunchForwardOf<__half, 192, 192>(a, stream);
  return "the emulator has head dims up to 128 in bfloat16, and others in float16";
}

}  // namespace kvblock::hopper
