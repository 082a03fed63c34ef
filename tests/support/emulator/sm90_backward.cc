// Hopper's backward kernels for the emulator: see sm90.cc.
#define KVBLOCK_EMULATES_CLUSTERS 1
#define KVBLOCK_KERNEL_NAMES_SHARED 1
#include "cuda_runtime.h"

namespace kvblock::hopper {
extern char shared[] __asm__("_ZN8emulator6sharedE");  // emulator::shared
}

#include "ops/attention/hopper/backward/launch.cuh"

namespace kvblock::hopper {

// The instances that there are not: each takes a while to compile.
#define KVBLOCK_NOT_HERE(type, dim, value_dim)                                        \
  template <>                                                                         \
  const char* LaunchBackwardKvOf<type, dim, value_dim>(const AttentionCall&, KvHeads, \
                                                       cudaStream_t) {                \
    return "the emulator has head dims up to 128 in bfloat16, and others in float16"; \
  }
KVBLOCK_NOT_HERE(__half, 64, 64)
KVBLOCK_NOT_HERE(__half, 96, 96)
KVBLOCK_NOT_HERE(__nv_bfloat16, 96, 96)
KVBLOCK_NOT_HERE(__half, 128, 128)
KVBLOCK_NOT_HERE(__nv_bfloat16, 192, 128)
KVBLOCK_NOT_HERE(__nv_bfloat16, 192, 192)
KVBLOCK_NOT_HERE(__nv_bfloat16, 256, 256)
#undef KVBLOCK_NOT_HERE

}  // namespace kvblock::hopper

#include "ops/attention/hopper/backward/backward.cu"
