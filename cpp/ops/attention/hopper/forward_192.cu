#include "ops/attention/hopper/forward_launch.cuh"

namespace kvblock::hopper {
KVBLOCK_HOPPER_FORWARD(192, 128)
KVBLOCK_HOPPER_FORWARD(192, 192)
}  // namespace kvblock::hopper
