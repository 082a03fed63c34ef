// Additions to global memory that return nothing (PTX red).
#pragma once

namespace kvblock {

// to[0] += x, to[1] += y, each atomically; `to` is aligned to 8 bytes. One instruction on sm_90.
__device__ __forceinline__ void ReduceAdd(float* to, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y)
               : "memory");
#else
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to + 1), "f"(y) : "memory");
#endif
}

// The same for four values; `to` is aligned to 16 bytes.
__device__ __forceinline__ void ReduceAdd(float* to, float x, float y, float z, float w) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x),
               "f"(y), "f"(z), "f"(w)
               : "memory");
#else
  ReduceAdd(to, x, y);
  ReduceAdd(to + 2, z, w);
#endif
}

// A counter between CTAs: who reads a value with LoadAcquire sees what was done before the
// AddRelease that made it.
__device__ __forceinline__ void AddRelease(int* counter, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
__device__ __forceinline__ int LoadAcquire(const int* counter) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// Puts `value` where `expected` was; returns what was there.
__device__ __forceinline__ int CompareAndSwap(int* counter, int expected, int value) {
  int found;
  asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(found)
               : "l"(counter), "r"(expected), "r"(value)
               : "memory");
  return found;
}

}  // namespace kvblock
