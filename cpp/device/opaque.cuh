// A value the compiler knows nothing about.
#pragma once

namespace kvblock {

// Keeps x from being computed late, and what is computed from x from being computed early or kept
// for later, where registers are dearer than instructions.
__device__ __forceinline__ int Opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ uint32_t Opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ float Opaque(float x) {
  asm volatile("" : "+f"(x));
  return x;
}
template <typename T>
__device__ __forceinline__ T* Opaque(T* x) {
  asm volatile("" : "+l"(x));
  return x;
}

// The same where it lies; of both at the same time.
__device__ __forceinline__ void MakeOpaque(uint32_t& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void MakeOpaque(float2& x) { asm volatile("" : "+f"(x.x), "+f"(x.y)); }

}  // namespace kvblock
