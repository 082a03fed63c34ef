// Dynamic shared memory of the emulator.
#pragma once

#include "cuda_runtime.h"

namespace kvblock {

inline char* DynamicShared() { return emulator::shared; }

}  // namespace kvblock
