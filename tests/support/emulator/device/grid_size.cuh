// Where a CTA is, for the emulator.
#pragma once

#include "cuda_runtime.h"

namespace kvblock {

inline int GridSize() { return static_cast<int>(gridDim.x); }
inline int MultiprocessorNumber() {
  return emulator::on_one_multiprocessor ? 0 : static_cast<int>(blockIdx.x);
}

}  // namespace kvblock
