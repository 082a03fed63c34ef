#include "ops/attention/hopper/forward_launch.cuh"

namespace kvblock::hopper {
KVBLOCK_HOPPER_FORWARD(96, 96)
}  // namespace kvblock::hopper
