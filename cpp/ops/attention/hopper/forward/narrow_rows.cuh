// What a warpgroup does with its rows in Hopper's forward kernel where operands are in 8 bits.
//
// A probability is 2^y, and its code in e4m3 is its logarithm, nearly: with an exponent of E and a
// mantissa of M eighths the code is 8 (E + 7) + M, and 8 log2(1 + M / 8) is M to within 0.69. So
// the code is 8 (y + 7), rounded: neither an exponential nor a conversion to e4m3. A float16 below
// 2^-13 has its number, in units of 2^-24, as its bits. So one fused multiply-add makes 2^-24 times
// the code, and a conversion to float16, of two at a time, rounds both and holds them to 0.
//
// Beside a probability that is rounded to e4m3 the error is 3.1 % in the root mean square instead
// of 2.6 %. Since rows are divided by the sum of what the products took, the mean error cancels.
#pragma once

#include <cstdint>

#include "device/narrow.cuh"
#include "ops/attention/hopper/forward/rows.cuh"

namespace kvblock::hopper {

// Scores become codes, as the A operand has them: a lane's four of 16 keys are those of columns 2 t,
// 2 t + 1, 8 + 2 t and 9 + 2 t, where products of 8 bits look for 4 t to 4 t + 3: V's keys are in
// that order (transpose_values.cuh). What is below 2^-7 vanishes; nothing is above 448, since
// references lie so (kLifted). NaN stays NaN.
template <typename Traits>
__device__ __forceinline__ void Codes(Rows<Traits>& rows, float to_log2) {
  // 8 log2(1 + M / 8) - M is 0.46 in the mean.
  constexpr float kUnit = 1.0f / (1 << 24), kOffset = (8 * 7 - 0.46f) * kUnit;
  auto& s = rows.state.s[0];
  const float scale = to_log2 * (8 * kUnit);
  float offset[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    offset[half] = fmaf(rows.sums.reference[half], -8 * kUnit, kOffset);
  }
#pragma unroll
  for (int n = 0; n < Traits::kKeys / 8; n += 2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t pair[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* const x = &s[n + i][half * 2];
        pair[i] = NumbersOfUnits(fmaf(x[0], scale, offset[half]), fmaf(x[1], scale, offset[half]));
      }
      rows.p[n / 4][n % 4 + half] = __byte_perm(pair[0], pair[1], 0x6420);
    }
  }
}

// O = factor O + P V, and the same of the sums of P. `factor` brings O to the references that P is
// relative to.
template <typename Traits>
__device__ __forceinline__ void AddProduct(Rows<Traits>& rows, const float (&factor)[2]) {
  auto& o = rows.state.o[0];
#pragma unroll
  for (int n = 0; n < Traits::kValueDim / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      o[n][e] = fmaf(o[n][e], factor[e / 2], rows.product[n * 4 + e]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = rows.product[Traits::kValueDim / 2 + half * 2];
    rows.total[half] = fmaf(rows.total[half], factor[half], sum);
  }
}

}  // namespace kvblock::hopper
