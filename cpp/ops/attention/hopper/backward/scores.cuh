// From scores to P and dS in the registers of a warpgroup.
//
// A warpgroup holds S^T and dP^T: 64 keys by 2 kCount queries, as accumulators lie in its threads
// (wgmma.cuh). So a thread has rows (keys) g and g + 8 of its warp's 16, and columns (queries)
// 8 n + 2 t and the one after it.
#pragma once

#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "device/fast_math.cuh"
#include "device/ldmatrix.cuh"
#include "device/mma.cuh"
#include "device/opaque.cuh"
#include "device/stmatrix.cuh"
#include "device/tensor_copy.cuh"
#include "ops/attention/hopper/backward/shared.cuh"
#include "ops/attention/mask/backward_scores.cuh"

namespace kvblock::hopper {

// Packed pairs, in the order in which a product takes its A operand from registers.
template <int kCount>
using Packed = uint32_t[kCount / 8][4];

template <typename T, int kCount>
__device__ __forceinline__ void PackAll(Packed<kCount>& to, const float (&c)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount / 8; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[k][i] = Pack<T>(c[k * 8 + i * 2], c[k * 8 + i * 2 + 1]);
  }
}

// Two of P, packed, times those of dP - delta. A masked score takes nothing, not even a NaN.
template <typename T>
__device__ __forceinline__ uint32_t PackSlopes(uint32_t prob, float low, float high, bool masked) {
  const float2 x = Unpack<T>(prob);
  if (masked) {
    if (x.x == 0.0f) low = 0.0f;
    if (x.y == 0.0f) high = 0.0f;
  }
  return Pack<T>(x.x * low, x.y * high);
}

// lse or delta of the 2 kCount queries of a thread, from shared memory: of its two in block n.
__device__ __forceinline__ float2 RowPair(const float* rows, int n, int thread) {
  return reinterpret_cast<const float2*>(rows)[n * 4 + thread % 4];
}
// dS = P (dP - delta), all but dP packed; with a softcap P times its slope stands for P. `ds` may
// be `prob`. kLate: P is not unpacked before it is needed, since there are no registers for that.
template <typename T, bool kLate, int kBlocks, int kCount>
__device__ __forceinline__ void PackedSlopes(uint32_t (&ds)[kBlocks][4],
                                             uint32_t (&prob)[kBlocks][4],
                                             const float (&dp)[kCount], const float* delta,
                                             int thread, bool masked) {
#pragma unroll
  for (int n = 0; n < kCount / 4; ++n) {
    const float2 d = RowPair(delta, n, thread);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = n * 4 + h * 2;
      uint32_t& packed = prob[n / 2][n % 2 * 2 + h];
      if constexpr (kLate) MakeOpaque(packed);
      ds[n / 2][n % 2 * 2 + h] = PackSlopes<T>(packed, dp[i] - d.x, dp[i + 1] - d.y, masked);
    }
  }
}

// Writes packed rows to a swizzled tile, its first at (row, column).
template <typename Tile, int kBlocks>
__device__ __forceinline__ void StorePacked(uint32_t tile, int row, int column, int thread,
                                            const uint32_t (&r)[kBlocks][4]) {
  const int lane = thread % 32, lane_row = row + thread / 32 * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
    StoreMatrices(tile + Tile::Offset(lane_row, column + k * 16 + lane / 16 * 8), r[k]);
  }
}

// Reads them.
template <typename Tile, int kBlocks>
__device__ __forceinline__ void LoadPacked(uint32_t tile, int row, int column, int thread,
                                           uint32_t (&r)[kBlocks][4]) {
  const int lane = thread % 32, lane_row = row + thread / 32 * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
    LoadMatrices(r[k], tile + Tile::Offset(lane_row, column + k * 16 + lane / 16 * 8));
  }
}

// Writes the transpose: a row becomes a column. Where a thread writes to:
template <typename Tile>
__device__ __forceinline__ uint32_t TransposedAt(uint32_t tile, int row, int column, int thread) {
  const int lane = thread % 32;
  return tile +
         Tile::Offset(row + lane / 16 * 8 + lane % 8, column + thread / 32 * 16 + lane / 8 % 2 * 8);
}
template <typename Tile, int kBlocks>
__device__ __forceinline__ void StoreTransposed(uint32_t tile, int row, int column, int thread,
                                                const uint32_t (&r)[kBlocks][4]) {
  const uint32_t to = TransposedAt<Tile>(tile, row, column, thread);
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) StoreTransposes(to + k * 16 * kChunkRowBytes, r[k]);
}

// Rounds and writes accumulators.
template <typename T, typename Tile, int kCount>
__device__ __forceinline__ void StoreAccumulators(uint32_t tile, int row, int column, int thread,
                                                  const float (&c)[kCount], float scale) {
  const int lane = thread % 32, lane_row = row + thread / 32 * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < kCount / 8; ++k) {
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      r[i] = Pack<T>(c[k * 8 + i * 2] * scale, c[k * 8 + i * 2 + 1] * scale);
    }
    StoreMatrices(tile + Tile::Offset(lane_row, column + k * 16 + lane / 16 * 8), r);
  }
}

// Rows [from, kRows) of a tile become zeros.
template <typename Tile>
__device__ __forceinline__ void ZeroRows(char* tile, int from, int thread, int threads) {
  constexpr int kPieces = Tile::kChunks * 8;
  for (int i = thread + from * kPieces; i < Tile::kRows * kPieces; i += threads) {
    const int row = i / kPieces, column = i % kPieces * 8;
    *reinterpret_cast<int4*>(tile + Tile::Offset(row, column)) = make_int4(0, 0, 0, 0);
  }
}

// RowPair's values of a warpgroup, those of the first kBlocks held in registers.
template <int kBlocks>
struct HeldRows {
  const float* rows;
  float2 pairs[kBlocks];

  __device__ __forceinline__ HeldRows(const float* rows, int thread) : rows(rows) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      pairs[n] = RowPair(rows, n, thread);
      MakeOpaque(pairs[n]);  // not later
    }
  }
  __device__ __forceinline__ operator const float*() const { return rows; }
};
template <int kBlocks>
__device__ __forceinline__ float2 RowPair(const HeldRows<kBlocks>& held, int n, int thread) {
  return n < kBlocks ? held.pairs[n] : RowPair(held.rows, n, thread);
}

// What a warpgroup drops of a tile: of 64 keys, a thread's two rows of 16, by queries.
struct NoDropout {
  template <typename Prob>
  __device__ __forceinline__ void Drop(Prob&) const {}
  template <typename Grads>
  __device__ __forceinline__ void DropGrads(Grads&) const {}
  template <typename Prob>
  __device__ __forceinline__ void DropBlock(Prob&, int) const {}
  template <typename Grads>
  __device__ __forceinline__ void DropGradBlock(Grads&, int) const {}
};
template <typename T>
struct TileDropout {
  const Dropout& d;
  uint32_t query_part, key_part;  // of the first of this thread's queries, and of its keys
  uint32_t factor;                // of these

  // first_key and first_query are multiples of 16.
  __device__ __forceinline__ TileDropout(const DroppingParams& p, int batch, int first_key,
                                         int first_query, int head, int thread)
      : d(p.dropout) {
    const uint2 key = DropoutKey(d, batch, p.num_heads, head);
    query_part = QueryPart(key.x, first_query, thread % 4 * 2);
    key_part = KeyPart(key.y, first_key + thread / 32 * 16, thread % 32 / 4);
    factor = thread / 4 % 2 != 0 ? kOddFactor : kEvenFactor;
  }
  __device__ __forceinline__ DropoutWords Words(int block) const {  // of 8 queries
    return WordsOfKey(query_part + block / 2 * kQueryBlock, key_part, factor);
  }

  // A block of 8 queries of P, packed; of dP.
  template <typename Prob>
  __device__ __forceinline__ void DropBlock(Prob& prob, int n) const {
    const DropoutWords words = Words(n);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t& pair = prob[n / 2][n % 2 * 2 + h];
      pair = TimesOnes<T>(pair, words.Ones(n % 2 * 2 + h, d.least));
    }
  }
  template <typename Grads>
  __device__ __forceinline__ void DropGradBlock(Grads& dp, int n) const {
    const DropoutWords words = Words(n);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t ones = words.Ones(n % 2 * 2 + h, d.least);
      dp[n * 4 + h * 2] *= __uint_as_float(ones << 16);
      dp[n * 4 + h * 2 + 1] *= __uint_as_float(ones & 0xffff0000u);
    }
  }
  // All of them.
  template <int kCount>
  __device__ __forceinline__ void Drop(uint32_t (&prob)[kCount][4]) const {
#pragma unroll
    for (int n = 0; n < 2 * kCount; ++n) DropBlock(prob, n);
  }
  template <int kCount>
  __device__ __forceinline__ void DropGrads(float (&dp)[kCount]) const {
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) DropGradBlock(dp, n);
  }
};

// One warpgroup's part of a tile of scores. lse and delta, held or where they lie, are those of its
// queries, lse in units of log 2. kPlain: there is no softcap and no bias; Shape::kCapped: only a
// softcap.
template <typename T, int kCount, bool kPlain, typename Shape>
struct BackwardScores {
  static constexpr bool kCapped = Shape::kCapped;
  const AttentionParams& p;
  const Sequence& s;
  int first_key, first_query, head, thread, flags;  // of BackwardStep

  // c becomes P, and `prob` P packed; with a softcap c is then multiplied by its slope.
  template <typename Rows>
  __device__ __forceinline__ void Probabilities(Packed<kCount>& prob, float (&c)[kCount],
                                                const Rows& lse, bool masked) const {
    if constexpr (kPlain) {
      PlainProbabilities(c, lse, masked);
      PackAll<T>(prob, c);
    } else if constexpr (kCapped) {
      CappedProbabilities(prob, c, lse, masked);
    } else {
      AnyProbabilities(prob, c, lse);
    }
  }
  // The same without options, not packed.
  template <typename Rows>
  __device__ __forceinline__ void PlainProbabilities(float (&c)[kCount], const Rows& lse,
                                                     bool masked) const {
    Exponents(c, lse, 0, kCount / 4);
    Raise(c, 0, kCount / 4);
    if (masked) MaskPairs(c);
  }

  // Without options, in parts, for blocks of 8 queries: c becomes the exponents of 2, ...
  template <typename Rows>
  __device__ __forceinline__ void Exponents(float (&c)[kCount], const Rows& lse, int first_block,
                                            int blocks) const {
    const float factor = Factor();
#pragma unroll
    for (int n = first_block; n < first_block + blocks; ++n) {
      const float2 l = RowPair(lse, n, thread);
#pragma unroll
      for (int e = 0; e < 4; ++e) c[n * 4 + e] = fmaf(c[n * 4 + e], factor, e % 2 ? -l.y : -l.x);
    }
  }
  // ... then P ...
  __device__ __forceinline__ static void Raise(float (&c)[kCount], int first_block, int blocks) {
#pragma unroll
    for (int i = 0; i < blocks * 4; ++i) c[first_block * 4 + i] = Exp2(c[first_block * 4 + i]);
  }
  // ... before what is masked takes part: the first `raised` blocks are P, of which it becomes 0,
  // then up to `exponents` there are exponents, then scores, which become P = 0 (or a NaN, where
  // lse is one); and its dP is 0, whatever it was.
  __device__ __forceinline__ void MaskBoth(float (&c)[kCount], float (&dp)[kCount], int raised,
                                           int exponents) const {
    const Band band = MakeBand();
    const float far = copysignf(INFINITY, -Factor());
    const auto hidden = [&](int i) {
      return i < raised * 4 ? 0.0f : i < exponents * 4 ? -INFINITY : far;
    };
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool attends = band.Attends(i);
      c[i] = attends ? c[i] : hidden(i);
      dp[i] = attends ? dp[i] : 0.0f;
    }
    if (HidesPairs()) {
      EachHidden([&](int i) {
        c[i] = hidden(i);
        dp[i] = 0.0f;
      });
    }
  }
  // P and dS of block n, packed.
  __device__ __forceinline__ static void PackBlock(Packed<kCount>& prob, Packed<kCount>& ds,
                                                   const float (&c)[kCount],
                                                   const float (&dp)[kCount], float2 delta, int n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = n * 4 + h * 2;
      prob[n / 2][n % 2 * 2 + h] = Pack<T>(c[i], c[i + 1]);
      ds[n / 2][n % 2 * 2 + h] =
          Pack<T>(c[i] * (dp[i] - delta.x), c[i + 1] * (dp[i + 1] - delta.y));
    }
  }

  // Masks P where it is packed already.
  __device__ __forceinline__ void MaskPacked(Packed<kCount>& prob) const {
    const Band band = MakeBand();
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const uint32_t keep =
          (band.Attends(i) ? 0xffffu : 0u) | (band.Attends(i + 1) ? 0xffff0000u : 0u);
      prob[i / 8][i % 8 / 2] &= keep;
    }
    if (HidesPairs()) {
      EachHidden([&](int i) { prob[i / 8][i % 8 / 2] &= i % 2 ? 0xffffu : 0xffff0000u; });
    }
  }

  // c becomes dS = P (dP - delta).
  template <typename Rows>
  __device__ __forceinline__ void Slopes(float (&c)[kCount], float (&dp)[kCount], const Rows& delta,
                                         bool masked) const {
    Slopes(c, c, dp, delta, masked);
  }
  // ds does, which may be c or dp.
  template <typename Rows>
  __device__ __forceinline__ void Slopes(float (&ds)[kCount], const float (&c)[kCount],
                                         float (&dp)[kCount], const Rows& delta,
                                         bool masked) const {
    if (masked) {  // a masked score takes nothing, not even a NaN
#pragma unroll
      for (int i = 0; i < kCount; ++i) dp[i] = c[i] == 0.0f ? 0.0f : dp[i];
    }
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
      const float2 d = RowPair(delta, n, thread);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        ds[n * 4 + e] = c[n * 4 + e] * (dp[n * 4 + e] - (e % 2 ? d.y : d.x));
      }
    }
  }

 private:
  // Of a score in its exponent; not 0, or what is masked by an infinite score would be a NaN.
  __device__ __forceinline__ float Factor() const {
    const float factor = p.scale * kLog2E;
    return factor == 0.0f ? FLT_MIN : factor;
  }

  // Which of a thread's scores lie inside of the band and the lengths.
  struct Band {
    int low, high[2], queries;

    __device__ __forceinline__ bool Attends(int i) const {
      const int column = i / 4 * 8 + i % 2, distance = i / 2 % 2 * 8 - column;
      return distance >= low && distance < high[i / 2 % 2] && column < queries;
    }
  };
  __device__ __forceinline__ Band MakeBand() const {
    const int key = first_key + thread / 32 * 16 + thread % 32 / 4;
    const int query = first_query + thread % 4 * 2, distance = key - query;
    const int right = s.right - distance;
    return {s.left - distance,
            {key < s.kv_len ? right : INT32_MIN, key + 8 < s.kv_len ? right : INT32_MIN},
            s.q_len - query};
  }
  __device__ __forceinline__ void MaskPairs(float (&c)[kCount]) const {
    const Band band = MakeBand();
#pragma unroll
    for (int i = 0; i < kCount; ++i) c[i] = band.Attends(i) ? c[i] : 0.0f;
    if (HidesPairs()) EachHidden([&](int i) { c[i] = 0.0f; });
  }

  // Whether a masked tile may have hidden pairs inside of the band.
  __device__ __forceinline__ bool HidesPairs() const {
    return Shape::kPartial || (flags & BackwardStep::kSegments) != 0;
  }
  // Calls `hide` for each of this thread's pairs of two segments, and of a bit of 0.
  template <typename Hide>
  __device__ __forceinline__ void EachHidden(const Hide& hide) const {
    const int key = first_key + thread / 32 * 16 + thread % 32 / 4;
    const int query = first_query + thread % 4 * 2;
    if (flags & BackwardStep::kSegments) {
      const int32_t* const of_queries = p.q_segments + s.q_row;
      const int32_t* const of_keys = p.kv_segments + s.kv_row;
      const int of_key[2] = {__ldg(of_keys + min(key, s.kv_rows - 1)),
                             __ldg(of_keys + min(key + 8, s.kv_rows - 1))};
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int of_query = __ldg(of_queries + min(query + i * 2 + e, s.q_rows - 1));
          if (of_query != of_key[0]) hide(i + e);
          if (of_query != of_key[1]) hide(i + 2 + e);
        }
      }
    }
    if constexpr (Shape::kPartial) EachHiddenByBits(hide, query, key);
  }
  template <typename Hide>
  __device__ __forceinline__ void EachHiddenByBits(const Hide& hide, int query, int key) const {
    const TileBits bits(p, s.batch, head, first_query, first_key);
    if (!bits.some()) return;
    const uint32_t* word = bits.Word(query, key);
    const int shift = bits.Shift(key), words = bits.words();
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {  // both keys lie in one word
        const uint32_t pair = __ldg(word + e * words) >> shift;
        if ((pair & 1) == 0) hide(i + e);
        if ((pair & 1 << 8) == 0) hide(i + 2 + e);
      }
      word = Opaque(word + 8 * words);
    }
  }

  template <typename Rows>
  __device__ __forceinline__ void CappedProbabilities(Packed<kCount>& prob, float (&c)[kCount],
                                                      const Rows& lse, bool masked) const {
    int max[2] = {};
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const auto size = [&](int i) { return fmaxf(fabsf(c[i]), fabsf(c[i + 1])); };
      max[i / 4 % 2] = MaxOfBits(max[i / 4 % 2], size(i), size(i + 2));
    }
    const float size = __int_as_float(::max(max[0], max[1]));
    if (__all_sync(~0u, size <= p.tiny_bound)) {
      CapWith(prob, c, lse, [&](float x, float row, float* slope) {
        *slope = p.tiny_cap.Slope(x);
        return p.tiny_cap(x, -row);
      });
    } else {
      CapMore(prob, c, lse, size);
    }
    if (masked) {
      MaskPairs(c);
      MaskPacked(prob);
    }
  }
  // The same of scores that are larger in some thread.
  template <typename Rows>
  __device__ __forceinline__ void CapMore(Packed<kCount>& prob, float (&c)[kCount], const Rows& lse,
                                          float size) const {
    const float cap = p.softcap, inverse = Reciprocal(cap), factor = p.scale * inverse;
    const auto exponent_of = [&](float capped, float row, float* slope) {
      const float share = capped * inverse;
      *slope = fmaf(-share, share, 1.0f);
      return fmaf(capped, kLog2E, -row);
    };
    if (cap >= kLargeSoftcap || fabsf(factor) > kLargestFactor) {
      CapWith(prob, c, lse, [&](float x, float row, float* slope) {
        return exponent_of(SoftCapExact(x * p.scale, cap, inverse), row, slope);
      });
    } else if (__all_sync(~0u, size * fabsf(factor) <= kSmallTanh)) {
      const SmallSoftCap exponent(cap * kLog2E, factor);
      const SmallSoftCapSlope slope_of(factor);
      CapWith(prob, c, lse, [&](float x, float row, float* slope) {
        *slope = slope_of(x);
        return exponent(x, -row);
      });
    } else {
      CapWith(prob, c, lse, [&](float x, float row, float* slope) {
        return exponent_of(SoftCap(x * (factor * kTwoLog2E), cap), row, slope);
      });
    }
  }
  // c becomes P times the slope of the softcap, `prob` P packed.
  template <typename Rows, typename Exponent>
  __device__ __forceinline__ void CapWith(Packed<kCount>& prob, float (&c)[kCount], const Rows& lse,
                                          const Exponent& exponent) const {
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
      const float2 l = RowPair(lse, n, thread);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* const pair = c + n * 4 + h * 2;
        float slope[2], x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          x[e] = Exp2(exponent(pair[e], e == 0 ? l.x : l.y, &slope[e]));
          pair[e] = x[e] * slope[e];
        }
        prob[n / 2][n % 2 * 2 + h] = Pack<T>(x[0], x[1]);
      }
    }
  }

  __device__ __forceinline__ void AnyProbabilities(Packed<kCount>& prob, float (&c)[kCount],
                                                   const float* lse) const {
    const Scores<T, true, Shape::kPartial> scores(p, s, head, first_query, first_key);
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
      const int worker = Opaque(thread), column = n * 8 + worker % 4 * 2;
      const int key = first_key + worker / 32 * 16 + worker % 32 / 4;
      float block[4], slope[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) block[e] = c[n * 4 + e];
      scores.Probabilities(block, first_query + column, key,
                           {lse[column] * kLn2, lse[column + 1] * kLn2}, slope);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        prob[n / 2][n % 2 * 2 + h] = Pack<T>(block[2 * h], block[2 * h + 1]);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) c[n * 4 + e] = block[e] * slope[e];
    }
  }
};

}  // namespace kvblock::hopper
