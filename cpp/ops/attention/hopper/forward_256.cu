#include "ops/attention/hopper/forward_launch.cuh"

namespace kvblock::hopper {
KVBLOCK_HOPPER_FORWARD(256, 256)
}  // namespace kvblock::hopper
