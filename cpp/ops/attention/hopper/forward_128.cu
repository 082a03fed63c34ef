#include "ops/attention/hopper/forward_launch.cuh"

namespace kvblock::hopper {
KVBLOCK_HOPPER_FORWARD(128, 128)
}  // namespace kvblock::hopper
