// Additions to global memory, for the emulator, whose CTAs run one after the other.
#pragma once

#include "cuda_runtime.h"

namespace kvblock {

inline void ReduceAdd(float* to, float x, float y) {
  to[0] += x;
  to[1] += y;
}
inline void ReduceAdd(float* to, float x, float y, float z, float w) {
  ReduceAdd(to, x, y);
  ReduceAdd(to + 2, z, w);
}

}  // namespace kvblock
