// float32 for tensor cores, which take numbers of 11 binary digits (TF32): one product of what is
// nearest, or three products of halves that hold 22 of float32's 24 digits.
//
// A register holds a float32, and the tensor cores do not look at its lower 13 bits. So rounding is
// to add half a unit of the 11th digit. The instruction for it, cvt.rna.tf32, comes out as four of
// the slower pipe up to sm_100, which take as long as the products that they are for.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kvblock {

// Element types of float32: by how products are computed. kThrice: a product of hi + lo is
// lo * hi + hi * lo + hi * hi, with an error near that of float32.
template <bool kThrice>
struct Float32 {
  float value;

  Float32() = default;
  __host__ __device__ explicit Float32(float x) : value(x) {}
  __host__ __device__ operator float() const { return value; }
};
using Tf32 = Float32<false>;
using Tf32x3 = Float32<true>;

// The nearest TF32 in the upper 19 bits, halves away from zero. NaN and infinities stay.
__device__ __forceinline__ uint32_t RoundToTf32(uint32_t x) {
  const float power = __int_as_float(static_cast<int>(x & 0xff800000u));  // with x's sign
  const float rounded = fmaf(power, 0x1p-11f, __int_as_float(static_cast<int>(x)));
  return static_cast<uint32_t>(__float_as_int(rounded));
}

// x as hi, the nearest TF32, and what is missing: at most 12 digits, of which the tensor cores take
// 11. NaN comes out in the latter; an infinity becomes inf and NaN.
__device__ __forceinline__ void SplitToTf32(uint32_t x, uint32_t* hi, uint32_t* lo) {
  *hi = (x + 0x1000u) & 0xffffe000u;
  const float rest = __int_as_float(static_cast<int>(x)) - __int_as_float(static_cast<int>(*hi));
  *lo = static_cast<uint32_t>(__float_as_int(rest));
}

}  // namespace kvblock
