// The number of CTAs, for the emulator.
#pragma once

#include "cuda_runtime.h"

namespace kvblock {

inline int GridSize() { return static_cast<int>(gridDim.x); }

}  // namespace kvblock
