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

inline void AddRelease(int* counter, int value) { *counter += value; }
// Who asks again and again lets others go on in between.
inline int LoadAcquire(const int* counter) {
  emulator::Yield();
  return *counter;
}
inline int CompareAndSwap(int* counter, int expected, int value) {
  const int found = *counter;
  if (found == expected) *counter = value;
  return found;
}

}  // namespace kvblock
