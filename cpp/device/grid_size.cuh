// Where a CTA is: of how many, and on which multiprocessor.
#pragma once

namespace kvblock {

// gridDim.x, read where it is needed, for kernels that are short of registers.
__device__ __forceinline__ int GridSize() {
  int size;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(size));
  return size;
}

// From 0 on; numbers may be missing.
__device__ __forceinline__ int MultiprocessorNumber() {
  int number;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  return number;
}

}  // namespace kvblock
