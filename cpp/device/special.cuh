// Approximate float32 functions of the special function unit (PTX ex2, lg2, rcp, sqrt), and a
// maximum.
#pragma once

namespace kvblock {

// 2^x, relative error 2^-22; 0 for -inf and far below, inf for inf, NaN for NaN.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x), with an absolute error of 2^-22 near 1 and that relative error elsewhere; -inf for 0.
__device__ __forceinline__ float Log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, relative error 2^-23; 0 for inf, inf for 0.
__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The square root, relative error 2^-23; NaN below 0.
__device__ __forceinline__ float SquareRoot(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger one, or NaN if one is (sm_80).
__device__ __forceinline__ float MaxOrNan(float a, float b) {
  float max;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(max) : "f"(a), "f"(b));
  return max;
}

// max(m, a, b) of the bits as integers, in one instruction (sm_90). With m >= 0: floats that are
// not negative are in order, and the others count for nothing; a NaN without a sign is above all.
__device__ __forceinline__ int MaxOfBits(int m, float a, float b) {
  int max;
  asm("{ .reg .s32 a, b, c; mov.b32 a, %2; mov.b32 b, %3; max.s32 c, %1, a; max.s32 %0, c, b; }"
      : "=r"(max)
      : "r"(m), "f"(a), "f"(b));
  return max;
}

}  // namespace kvblock
