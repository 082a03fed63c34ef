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
//
// Where queries and keys are int8, tensor cores add their products up as integers, exactly, to the
// bits of a float near 1.5 * 2^23 (kOfZero), which that makes a float with this sum at its end. The
// fused multiply-add takes its own scale times that away again, so no score is converted.
#pragma once

#include <cstdint>

#include "device/narrow.cuh"
#include "ops/attention/hopper/forward/rows.cuh"

namespace kvblock::hopper {

// Scores become codes, as the A operand has them: a lane's four of 16 keys are those of columns 2
// t, 2 t + 1, 8 + 2 t and 9 + 2 t, where products of 8 bits look for 4 t to 4 t + 3: V's keys are
// in that order (transpose_values.cuh). What is below 2^-7 vanishes. True: one of this thread's
// would be above 448, or is NaN, and its row needs another reference. `zero`: what scores are more
// than products.
template <typename Traits>
__device__ __forceinline__ bool Codes(Rows<Traits>& rows, float to_log2, float zero) {
  constexpr uint32_t kNan = 0x7f;  // the code behind that of 448
  // 8 log2(1 + M / 8) - M is 0.46 in the mean.
  constexpr float kUnit = 1.0f / (1 << 24), kOffset = (8 * 7 - 0.46f) * kUnit;
  auto& s = rows.state.s[0];
  const float scale = to_log2 * (8 * kUnit);
  float offset[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    offset[half] = fmaf(rows.sums.reference[half], -8 * kUnit, kOffset);
    if constexpr (Traits::kIntegers) offset[half] = fmaf(-zero, scale, offset[half]);
  }
  uint32_t largest[2] = {0, 0};
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
      largest[half] = LargestOfHalves(largest[half], pair[0], pair[1]);
    }
  }
  const uint32_t both = LargestOfHalves(largest[0], largest[1], 0);
  return both >= kNan << 16 || (both & 0xffff) >= kNan;
}

// Scores of integers as they are, and kOfZero; or, where a step of an integer is many bits of the
// exponent and kOfZero times it would lose the rest, without it, and 0.
template <typename Traits>
__device__ __forceinline__ float LeaveZero(Rows<Traits>& rows, float to_log2) {
  constexpr float kCoarse = 1.0f / 256;  // kOfZero times this is off by up to 0.002 powers of 2
  if (!__any_sync(~0u, to_log2 > kCoarse)) return kOfZero;
#pragma unroll
  for (float& x : rows.s()) x -= kOfZero;
  return 0.0f;
}

// A new reference lies kLifted below the largest score that its row is expected to have: so the
// largest probabilities come near 448, the largest number there is, and small ones do not vanish. A
// score may be larger by 0.7 until the row gets its next reference, as 2^8.7 < 448. It is not
// lifted where float32 rounds exponents by much.
constexpr float kLifted = 8.0f, kLiftedOutgrown = 8.7f, kLargeExponent = 1 << 20;
// A row is expected to have no larger score than the tile's largest, or than so many standard
// deviations of the tile's scores above their mean: normally distributed ones pass that once in
// 300,000, so rows of these nearly always keep their first reference. A row with a key that stands
// out leaves no room for larger ones. None leaves more than kMostRoom, or so much that the tile's
// smallest score would come below 2^-6, where codes end: there may be thousands like it.
constexpr float kDeviations = 4.5f, kMostRoom = 3.0f, kWidest = 8.0f + 5.5f;

// How far above a tile's maxima those of their rows are expected to be, in powers of 2: whole ones,
// so that a maximum's code is exact. Where keys of the tile are masked, 0.
template <typename Traits>
__device__ __forceinline__ void RoomToGrow(const Rows<Traits>& rows, const float (&max)[2],
                                           float to_log2, float (&room)[2]) {
  const auto& s = rows.state.s[0];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = 0.0f, squares = 0.0f, most = 0.0f;  // of how far scores are below the maximum
#pragma unroll
    for (int n = 0; n < Traits::kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float below = max[half] - s[n][half * 2 + i];
        sum += below;
        squares = fmaf(below, below, squares);
        most = fmaxf(most, below);
      }
    }
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
      sum += __shfl_xor_sync(~0u, sum, lanes);
      squares += __shfl_xor_sync(~0u, squares, lanes);
      most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
    }
    constexpr float kOne = 1.0f / Traits::kKeys;
    const float mean = sum * kOne, variance = fmaxf(fmaf(squares, kOne, -mean * mean), 0.0f);
    // Either is NaN or -inf if a score is -inf.
    const float grows = fmaf(kDeviations, SquareRoot(variance), -mean) * to_log2;
    const float fits = fmaf(-most, to_log2, kWidest);
    room[half] = rintf(fminf(fmaxf(fminf(grows, fits), 0.0f), kMostRoom));
  }
}

// New references for rows that have outgrown theirs. What came before is to be scaled by `factor`.
// A NaN becomes the reference.
template <typename Exponent>
__device__ __forceinline__ void LiftReferences(RowSums& sums, const float (&max)[2],
                                               const float (&room)[2], const Exponent& exponent,
                                               float (&factor)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float& reference = sums.reference[half];
    const float tile = exponent(max[half]), before = reference;
    const bool outgrown = !(tile <= before + kLiftedOutgrown);
    const float now = fabsf(tile) < kLargeExponent ? tile + room[half] - kLifted : tile;
    if (outgrown) reference = now;
    factor[half] = outgrown ? Exp2(before - now) : 1.0f;
  }
}

// The same with the references that a tile's scores ask for; codes are computed anew where there is
// another one, which is rare, but for the first tile. What P V is added to follows.
template <typename Traits, typename Exponent>
__device__ __forceinline__ void FollowingCodes(Rows<Traits>& rows, const Exponent& exponent,
                                               bool first) {
  float zero = 0.0f;  // the score of queries and keys without a product
  if constexpr (Traits::kIntegers) zero = LeaveZero(rows, exponent.to_log2);
  if (!first && !__any_sync(~0u, Codes(rows, exponent.to_log2, zero))) return;
  float max[2], room[2], factor[2];
  RowMaxima(rows, max);
  RoomToGrow(rows, max, exponent.to_log2, room);
  if constexpr (Traits::kIntegers) {
    max[0] -= zero;
    max[1] -= zero;
  }
  LiftReferences(rows.sums, max, room, exponent, factor);
  Rescale<Traits>(rows, factor);
  Codes(rows, exponent.to_log2, zero);
}

// Tiles of keys whose P V is one sum of the tensor cores, which keep fewer bits of it than float32
// has: each product of 32 keys may lose 2^-13 of the sum, so 512 keys less than 0.2 %.
constexpr int kSummedTiles = 4;

// O += P V, and the same of the sums of P.
template <typename Traits>
__device__ __forceinline__ void AddProduct(Rows<Traits>& rows) {
  constexpr int kColumns = Traits::kValueDim / 2;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) rows.o()[i] += rows.product[i];
#pragma unroll
  for (int half = 0; half < 2; ++half) rows.total[half] += rows.product[kColumns + half * 2];
}

}  // namespace kvblock::hopper
