// The number of CTAs, for kernels that are short of registers.
#pragma once

namespace kvblock {

// gridDim.x, read where it is needed.
__device__ __forceinline__ int GridSize() {
  int size;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(size));
  return size;
}

}  // namespace kvblock
