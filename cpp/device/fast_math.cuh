// Functions of float32 by few instructions, over those of the special function unit.
#pragma once

#include "device/special.cuh"

namespace kvblock {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kTwoLog2E = 2.885390081777927f;

// cap * tanh(y / kTwoLog2E), by tanh(t) = 1 - 2 / (1 + exp(2 t)): an absolute error near cap * 2e-7
// (with the hardware's own tanh it is cap * 5e-4).
__device__ __forceinline__ float SoftCap(float y, float cap) {
  return fmaf(-2.0f * cap, Reciprocal(1.0f + Exp2(y)), cap);
}

// cap * tanh(f x) where |f x| <= kSmallTanh: an odd polynomial, with an absolute error of cap *
// 8e-7 and no special functions. Its coefficients, powers of f, lie within float32 for the f that
// CheckSoftcap lets pass.
constexpr float kSmallTanh = 0.375f;
struct SmallSoftCap {
  float c1, c3, c5;
  SmallSoftCap() = default;
  __device__ __forceinline__ SmallSoftCap(float c1, float c3, float c5) : c1(c1), c3(c3), c5(c5) {}
  __device__ __forceinline__ SmallSoftCap(float cap, float f) {
    const float f2 = f * f;
    c1 = 0.9999854f * cap * f;
    c3 = -0.33248851f * cap * f * f2;
    c5 = 0.1209885f * cap * f * f2 * f2;
  }
  // x as it is.
  __device__ static __forceinline__ SmallSoftCap None() { return {1.0f, 0.0f, 0.0f}; }
  // That of -inf is -inf, where f > 0 is not below 1e-6 and c5 may have become 0; None, for |x| up
  // to 1e4.
  __device__ __forceinline__ SmallSoftCap KeepsInfinity() const { return {c1, c3, c5 + 1e-37f}; }
  __device__ __forceinline__ float operator()(float x) const { return x * Ratio(x); }
  // The same, plus y. It rises everywhere.
  __device__ __forceinline__ float operator()(float x, float y) const {
    return fmaf(x, Ratio(x), y);
  }
  // Whether that of a score, given by its bits, is larger than `limit`.
  __device__ __forceinline__ bool Exceeds(int score, float limit) const {
    return (*this)(__int_as_float(score)) > limit;
  }

 private:
  __device__ __forceinline__ float Ratio(float x) const {
    const float x2 = x * x;
    return fmaf(x2, fmaf(x2, c5, c3), c1);
  }
};

// The same, plus y, where |f x| <= kTinyTanh, with an absolute error of cap * 7e-7. Without a
// branch and with both of its powers in constant memory it hardly shows beside an exponential.
constexpr float kTinyTanh = 0.15f;
struct TinySoftCap {
  float c1, c3, s2;
  TinySoftCap() = default;
  __host__ __device__ TinySoftCap(float cap, float f)
      : c1(0.9999792f * cap * f), c3(-0.3296205f * cap * f * f * f), s2(-0.98758f * f * f) {}
  __device__ __forceinline__ float operator()(float x, float y) const {
    return fmaf(x, fmaf(x * x, c3, c1), y);
  }
  // 1 - tanh(f x)^2, with an absolute error of 6e-5.
  __device__ __forceinline__ float Slope(float x) const { return fmaf(x * x, s2, 1.0f); }
};

// 1 - tanh(f x)^2 where |f x| <= kSmallTanh, with an absolute error of 4e-5.
struct SmallSoftCapSlope {
  float s2, s4;
  __device__ __forceinline__ SmallSoftCapSlope(float f) {
    const float f2 = f * f;
    s2 = -0.9971273f * f2;
    s4 = 0.598533f * f2 * f2;
  }
  __device__ __forceinline__ float operator()(float x) const {
    const float x2 = x * x;
    return fmaf(x2, fmaf(x2, s4, s2), 1.0f);
  }
};

constexpr float kLargeSoftcap = 1024.0f;  // from here on scores need SoftCapExact
constexpr float kLargestFactor = 1e5f;    // scale / softcap whose powers the polynomials can have

// cap * tanh(x / cap) with a relative error near 1e-6: close to 0, where that form cancels, a
// series.
__device__ __forceinline__ float SoftCapExact(float x, float cap, float inverse_cap) {
  const float t = x * inverse_cap, t2 = t * t;
  const float series = fmaf(t2, fmaf(t2, -17.0f / 315.0f, 2.0f / 15.0f), -1.0f / 3.0f);
  return fabsf(t) < 0.25f ? fmaf(x * t2, series, x) : SoftCap(t * kTwoLog2E, cap);
}

}  // namespace kvblock
