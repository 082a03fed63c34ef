// What a warpgroup does with its rows in Hopper's forward kernel where operands are in 8 bits.
//
// A probability is 2^y, and its code in e4m3 is its logarithm, nearly: with an exponent of E and a
// mantissa of M eighths the code is 8 (E + 7) + M, and 8 log2(1 + M / 8) is M to within 0.69. So
// the code is 8 (y + 7), rounded: two fused multiply-adds, and neither an exponential nor a
// conversion. Beside a probability that is rounded to e4m3 the error is 3.1 % in the root mean
// square instead of 2.6 %. Since rows are divided by the sum of what the products took, the mean
// error cancels.
#pragma once

#include <cstdint>

#include "ops/attention/hopper/forward/rows.cuh"

namespace kvblock::hopper {

// The codes of columns 8 kFrom to 8 kTo, two and two together: those of a lane's four of 16 keys
// are pairs[n + half] for n = 0, 2, ... and half, a row. What is above 448 becomes 448, what is
// below 2^-7 vanishes: references lie so that neither matters (kLifted).
template <typename Traits>
using CodePairs = uint32_t[Traits::kKeys / 8][2];
template <int kFrom, int kTo, typename Traits>
__device__ __forceinline__ void Codes(Rows<Traits>& rows, float to_log2, CodePairs<Traits>& pairs) {
  // A code is a number from 0 to 1 first, as that bounds it for free, times the largest one, 126;
  // what lies behind the point is cut off. 8 log2(1 + M / 8) - M is 0.46 in the mean.
  constexpr float kLargest = 126.9f, kOffset = 8 * 7 + 0.5f - 0.46f;
  auto& s = rows.state.s[0];
  const float scale = to_log2 * (8.0f / kLargest);
  float offset[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    offset[half] = fmaf(rows.sums.reference[half], -8.0f / kLargest, kOffset / kLargest);
  }
#pragma unroll
  for (int n = kFrom; n < kTo; n += 2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t of_key[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = s[n + i / 2][half * 2 + i % 2];
        const float part = __saturatef(fmaf(x, scale, offset[half]));
        // Of a number from 2 to 4 the code is bits 16 to 22, and bit 23 is 0.
        of_key[i] = __float_as_uint(fmaf(part, kLargest / 64, 2.0f));
      }
      pairs[n + half][0] = __byte_perm(of_key[0], of_key[1], 0x0062);
      pairs[n + half][1] = __byte_perm(of_key[2], of_key[3], 0x0062);
    }
  }
}

// They are there, before what follows.
template <int kFrom, int kTo, typename Traits>
__device__ __forceinline__ void KeepCodes(CodePairs<Traits>& pairs) {
#pragma unroll
  for (int i = kFrom; i < kTo; ++i) {
    asm volatile("" : "+r"(pairs[i][0]), "+r"(pairs[i][1])::"memory");
  }
}

// The A operand. A lane's four of 16 keys are those of columns 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t,
// where products of 8 bits look for 4 t to 4 t + 3: V's keys are in that order
// (transpose_values.cuh).
template <typename Traits>
__device__ __forceinline__ void PackCodes(Rows<Traits>& rows, const CodePairs<Traits>& pairs) {
#pragma unroll
  for (int i = 0; i < Traits::kKeys / 8; ++i) {
    rows.p[i / 4][i % 4] = __byte_perm(pairs[i][0], pairs[i][1], 0x5410);
  }
}

// O += P V, or O = P V for an item's first tile, and the same of the sums of P.
template <typename Traits>
__device__ __forceinline__ void AddProduct(Rows<Traits>& rows, bool first) {
  auto& o = rows.o();
  constexpr int kColumns = Traits::kValueDim / 2;
  if (first) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) o[i] = rows.product[i];
#pragma unroll
    for (int half = 0; half < 2; ++half) rows.total[half] = rows.product[kColumns + half * 2];
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) o[i] += rows.product[i];
#pragma unroll
    for (int half = 0; half < 2; ++half) rows.total[half] += rows.product[kColumns + half * 2];
  }
}

}  // namespace kvblock::hopper
