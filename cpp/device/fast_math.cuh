// Approximate float32 functions of the special function unit (PTX ex2, rcp).
#pragma once

namespace kvblock {

// 2^x, relative error 2^-22; 0 for -inf and far below, inf for inf, NaN for NaN.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, relative error 2^-23; 0 for inf, inf for 0.
__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh with an absolute error near 1e-7 (the hardware's own tanh has 5e-4).
__device__ __forceinline__ float Tanh(float x) {
  constexpr float kTwoLog2E = 2.885390081777927f;
  return 1.0f - 2.0f * Reciprocal(1.0f + Exp2(x * kTwoLog2E));
}

}  // namespace kvblock
