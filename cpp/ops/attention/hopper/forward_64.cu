#include "ops/attention/hopper/forward_launch.cuh"

namespace kvblock::hopper {
KVBLOCK_HOPPER_FORWARD(64, 64)
}  // namespace kvblock::hopper
