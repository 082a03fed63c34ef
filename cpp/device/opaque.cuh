// A value the compiler knows nothing about.
#pragma once

namespace kvblock {

// Keeps what is computed from x from being computed early or kept for later, where registers are
// dearer than instructions.
__device__ __forceinline__ int Opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace kvblock
