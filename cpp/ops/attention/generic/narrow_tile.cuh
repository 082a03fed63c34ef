// A tile of rows of 8-bit elements in shared memory, and its fragments as float16.
//
// A row is kDim bytes: kDim / 16 chunks of 16. Chunk c of row r lies at chunk c ^ (r % 8) of its
// row, or, where rows are no multiple of 128 bytes, at c ^ (r / 2 % 4): ldmatrix reads eight rows
// at the same chunk, and the eight places differ modulo 128 bytes.
//
// ldmatrix gives a lane words of four elements. In which order the product sums does not matter, so
// K's word is two registers of its operand: elements 4 t and 4 t + 1 of 16 stand where 2 t and 2 t
// + 1 would, and the next two where 2 t + 8 and 2 t + 9 would. Q has the same order. Transposed,
// V's word has two columns of two keys: the even columns of 16 are one operand, the odd ones
// another. So a lane has four neighbours of a row of O.
#pragma once

#include <cstdint>

#include "device/ldmatrix.cuh"
#include "device/mma.cuh"
#include "device/widen.cuh"
#include "ops/attention/mask/forward_scores.cuh"

namespace kvblock::generic {

template <int kRows_, int kDim_>
struct NarrowTile {
  static constexpr int kRows = kRows_, kDim = kDim_;
  static constexpr int kRowBytes = kDim, kBytes = kRows * kRowBytes;
  static constexpr bool kWide = kDim % 128 == 0;
  // Of the threads that copy a row together, each takes a chunk at a time.
  static constexpr int kLanes = kWide ? 8 : 4, kColumnsOfChunk = 16;
  static_assert(kDim % 64 == 0 && kRows % 16 == 0);

  __device__ static __forceinline__ int Swizzle(int row) { return kWide ? row % 8 : row / 2 % 4; }
  __device__ static __forceinline__ uint32_t ChunkOffset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ Swizzle(row)) * 16;
  }
};

// A lane's part of the addresses of 16 x 32 blocks of K (rows, then columns), or transposed of V.
// The four 8 x 16 matrices: those of the first 8 rows, of their first and next 16 columns, then
// those of the next 8. Transposed both rows come first.
template <typename Tile, bool kTransposed>
struct NarrowLane {
  uint32_t rows, swizzle;

  __device__ __forceinline__ explicit NarrowLane(int lane) {
    const int matrix = lane / 8, down = kTransposed ? matrix % 2 : matrix / 2;
    const int right = kTransposed ? matrix / 2 : matrix % 2, row = down * 8 + lane % 8;
    rows = row * Tile::kRowBytes;
    swizzle = (right ^ Tile::Swizzle(row)) * 16;
  }

  // Of the block at (row, column), multiples of 16 and 32, in the tile at `base`.
  __device__ __forceinline__ uint32_t Address(uint32_t base, int row, int column) const {
    constexpr uint32_t kMask = Tile::kLanes * 16 - 1;
    const uint32_t bytes = column;
    return base + rows + (swizzle ^ (bytes & kMask)) + row * Tile::kRowBytes + (bytes & ~kMask);
  }
};

// S = Q K^T of this warp's 16 rows.
template <typename Traits>
__device__ __forceinline__ void MultiplyNarrow(ForwardRows<Traits>& rows,
                                               const uint32_t (&q)[Traits::kDim / 16][1][4],
                                               uint32_t k_tile, int lane) {
  using Cache = typename Traits::Cache;
  const NarrowLane<typename Traits::KvTile, false> at(lane);
#pragma unroll
  for (int n = 0; n < Traits::kKeys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) rows.s[0][n][e] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < Traits::kDim / 16; step += 2) {
#pragma unroll
    for (int n = 0; n < Traits::kKeys / 16; ++n) {
      uint32_t k[4];
      LoadMatrices(k, at.Address(k_tile, n * 16, step * 16));
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        Mma16x8x16<__half>(rows.s[0][2 * n + m / 2], q[step + m % 2][0],
                           Cache::template Widen<TwoOf::kLow>(k[m]),
                           Cache::template Widen<TwoOf::kHigh>(k[m]));
      }
    }
  }
}

// P = exp2(S - max) and O += P V, 16 keys at a time. weigh(key, x) tells what of a probability
// counts in the sum: where values have scales of their own, x is larger by the key's.
template <typename Traits, typename Weigh>
__device__ __forceinline__ void AccumulateNarrow(ForwardRows<Traits>& rows, float to_log2,
                                                 uint32_t v_tile, int lane, Weigh weigh) {
  using Cache = typename Traits::Cache;
  const NarrowLane<typename Traits::KvTile, true> at(lane);
  float reference[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    reference[half] = Reference(rows.max[0][half], to_log2);
  }
#pragma unroll
  for (int step = 0; step < Traits::kKeys / 16; ++step) {
    uint32_t p[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float (&x)[4] = rows.s[0][2 * step + n];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = Exp2(fmaf(x[e], to_log2, -reference[e / 2]));
        rows.sum[0][e / 2] += weigh((2 * step + n) * 8 + lane % 4 * 2 + e % 2, x[e]);
      }
      p[2 * n] = Pack<__half>(x[0], x[1]);
      p[2 * n + 1] = Pack<__half>(x[2], x[3]);
    }
#pragma unroll
    for (int n = 0; n < Traits::kDim / 16; n += 2) {
      uint32_t v[4];
      LoadMatricesTransposed(v, at.Address(v_tile, step * 16, n * 16));
#pragma unroll
      for (int right = 0; right < 2; ++right) {
        const uint32_t upper = v[2 * right], lower = v[2 * right + 1];
        Mma16x8x16<__half>(rows.o[0][2 * (n + right)], p,
                           Cache::template Widen<TwoOf::kEven>(upper),
                           Cache::template Widen<TwoOf::kEven>(lower));
        Mma16x8x16<__half>(rows.o[0][2 * (n + right) + 1], p,
                           Cache::template Widen<TwoOf::kOdd>(upper),
                           Cache::template Widen<TwoOf::kOdd>(lower));
      }
    }
  }
}

}  // namespace kvblock::generic
