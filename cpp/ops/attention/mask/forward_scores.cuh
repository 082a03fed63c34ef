// The scores of a forward pass in a warp's registers: the rules that turn products into scores, and
// what both kernels do with a row.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/fast_math.cuh"
#include "ops/attention/contract/params.cuh"
#include "ops/attention/mask/sequence.cuh"
#include "ops/attention/mask/tile_bits.cuh"

namespace kvblock {

// The state of a warp's rows. Of every block of 16 rows a lane holds rows g and g + 8, g = lane /
// 4, and columns 2 t, 2 t + 1, t = lane % 4, of each 8 columns (device/mma.cuh).
template <typename Traits>
struct ForwardRows {
  float o[Traits::kRowBlocks][Traits::kDim / 8][4];
  float s[Traits::kRowBlocks][Traits::kKeys / 8][4];  // scores, then probabilities
  float max[Traits::kRowBlocks][2];                   // of the scores, before `to_log2`
  float sum[Traits::kRowBlocks][2];                   // this lane's columns only
};

// Before the first key.
template <typename Traits>
__device__ __forceinline__ void BeginRows(ForwardRows<Traits>& rows) {
#pragma unroll
  for (int rb = 0; rb < Traits::kRowBlocks; ++rb) {
    rows.max[rb][0] = rows.max[rb][1] = -INFINITY;
    rows.sum[rb][0] = rows.sum[rb][1] = 0.0f;
#pragma unroll
    for (int n = 0; n < Traits::kDim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) rows.o[rb][n][e] = 0.0f;
    }
  }
}

// What turns S into scores. Without softcap and bias and with a positive scale, scaling commutes
// with the maximum and is left to the exponential; otherwise the scores are finished first.
struct ScoreRules {
  bool finish;    // FinishScores scales, caps and adds the bias
  float to_log2;  // score * to_log2 is the exponent of 2; positive
};

__device__ __forceinline__ ScoreRules MakeScoreRules(const AttentionParams& p) {
  const bool finish = p.softcap > 0.0f || p.bias != nullptr || !(p.scale > 0.0f);
  return {finish, finish ? kLog2E : p.scale * kLog2E};
}

// With a bias scores may be so large that float32 has no digits for what is beside them. Then a
// row's base is subtracted from its scores before anything else happens to them.
__device__ __forceinline__ bool HasBases(const AttentionParams& p) { return p.bias != nullptr; }

template <typename Bias>
__device__ __forceinline__ float ToFloat(Bias value) {
  return static_cast<float>(value);
}

// Adds the bias. Where the tile's keys all lie in the array no load has a condition, so that many
// are under way at once; rows past the end read the last row instead, since theirs are never
// written.
template <typename Traits, typename Bias>
__device__ __forceinline__ void AddBias(const AttentionParams& p, const Sequence& s, int head,
                                        ForwardRows<Traits>& rows, int query, int key) {
  struct alignas(2 * sizeof(Bias)) Pair {
    Bias low, high;
  };
  const int64_t plane = static_cast<int64_t>(BatchRow(p, p.bias_batch, s.batch)) * p.bias_heads +
                        (p.bias_heads > 1 ? head : 0);
  const Bias* bias = static_cast<const Bias*>(p.bias) + plane * p.q_len * p.kv_len;
  const bool inside = key / 8 * 8 + Traits::kKeys <= s.kv_rows;  // a tile begins at a multiple of 8
  const bool even = s.kv_rows % 2 == 0 && reinterpret_cast<uintptr_t>(p.bias) % sizeof(Pair) == 0;
#pragma unroll
  for (int rb = 0; rb < Traits::kRowBlocks; ++rb) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = min(query + rb * 16 + half * 8, s.q_rows - 1);
      const Bias* row = bias + i * p.kv_len + key;
      const auto add = [&](int n, float low, float high) {
        rows.s[rb][n][half * 2] += low;
        rows.s[rb][n][half * 2 + 1] += high;
      };
      if (inside && even) {
#pragma unroll
        for (int n = 0; n < Traits::kKeys / 8; ++n) {
          const Pair pair = *reinterpret_cast<const Pair*>(row + n * 8);
          add(n, ToFloat(pair.low), ToFloat(pair.high));
        }
      } else if (inside) {
#pragma unroll
        for (int n = 0; n < Traits::kKeys / 8; ++n) {
          add(n, ToFloat(row[n * 8]), ToFloat(row[n * 8 + 1]));
        }
      } else {
        const int left = s.kv_rows - key;
#pragma unroll
        for (int n = 0; n < Traits::kKeys / 8; ++n) {
          if (n * 8 < left) add(n, ToFloat(row[n * 8]), 0.0f);
          if (n * 8 + 1 < left) add(n, 0.0f, ToFloat(row[n * 8 + 1]));
        }
      }
    }
  }
}

// -inf where a query does not attend by its position. `query(n)` is that of this lane's row n, and
// `key` its first. Hardly a tile lies on both edges of the band: each is a pass behind a uniform
// branch.
template <typename Traits, typename Query>
__device__ __forceinline__ void MaskBand(const Sequence& s, ForwardRows<Traits>& rows, Query query,
                                         int key) {
#pragma unroll
  for (int rb = 0; rb < Traits::kRowBlocks; ++rb) {
    int low[2], high[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = query(rb * 16 + half * 8);
      low[half] = s.FirstKey(i) - key;
      high[half] = i < s.q_len ? s.EndKey(i) - key : 0;
    }
    const auto mask = [&](auto hidden) {
#pragma unroll
      for (int n = 0; n < Traits::kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (hidden(n * 8 + e % 2, e / 2)) rows.s[rb][n][e] = -INFINITY;
        }
      }
    };
    if (__any_sync(~0u, min(high[0], high[1]) < Traits::kKeys)) {
      mask([&](int j, int half) { return j >= high[half]; });
    }
    if (__any_sync(~0u, max(low[0], low[1]) > 0)) {
      mask([&](int j, int half) { return j < low[half]; });
    }
  }
}

// The same where rows are queries, one after the other. `query` is that of this lane's first row.
template <typename Traits>
__device__ __forceinline__ void MaskPositions(const Sequence& s, ForwardRows<Traits>& rows,
                                              int query, int key) {
  MaskBand<Traits>(s, rows, [query](int row) { return query + row; }, key);
}

// -inf where a query's segment is not the key's. No load has a condition, so that many are under
// way at once: past the end comes the last key's, since those keys are masked by their positions.
template <typename Traits>
__device__ __forceinline__ void MaskSegments(const AttentionParams& p, const Sequence& s,
                                             ForwardRows<Traits>& rows, int query, int key) {
  const int32_t* const of_keys = p.kv_segments + s.kv_row + key;
  const int last_key = s.kv_rows - 1 - key;
#pragma unroll
  for (int rb = 0; rb < Traits::kRowBlocks; ++rb) {
    const int i = query + rb * 16, last = s.q_rows - 1;
    const int32_t* const of_queries = p.q_segments + s.q_row;
    const int segment[2] = {__ldg(of_queries + min(i, last)), __ldg(of_queries + min(i + 8, last))};
#pragma unroll
    for (int n = 0; n < Traits::kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int of_key = __ldg(of_keys + min(n * 8 + e, last_key));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (of_key != segment[half]) rows.s[rb][n][half * 2 + e] = -INFINITY;
        }
      }
    }
  }
}

// -inf where the bits of a partial tile are 0. Queries past the end have bits, too. Eight columns
// lie in one word, since a tile begins at a multiple of 16. Keys that are not whole words may reach
// past the listed tile: those are hidden by their positions.
template <typename Traits>
__device__ __forceinline__ void MaskTileBits(const AttentionParams& p, const Sequence& s, int head,
                                             ForwardRows<Traits>& rows, int query, int key) {
  constexpr bool kWholeWords = Traits::kKeys % 32 == 0;
  const TileBits bits(p, s.batch, head, query, key);
  if (!bits.some()) return;
  const uint32_t* words = bits.Word(query, key);
  const int shift = bits.Shift(key), rows_apart = 8 * bits.words(), end = 32 * bits.WordsFrom(key);
#pragma unroll
  for (int row = 0; row < 2 * Traits::kRowBlocks; ++row) {
#pragma unroll
    for (int n = 0; n < Traits::kKeys / 8; ++n) {
      // Where whole words are a tile, the first column lies in the first 8 bits of one.
      const int column = (kWholeWords ? shift % 8 : shift) + n * 8;
      if (!kWholeWords && column >= end) break;
      const int word = kWholeWords ? n / 4 : column / 32;
      const uint32_t pair = __ldg(words + word) >> (column % 32);
      float (&c)[4] = rows.s[row / 2][n];
      if ((pair & 1) == 0) c[row % 2 * 2] = -INFINITY;
      if ((pair & 2) == 0) c[row % 2 * 2 + 1] = -INFINITY;
    }
    words = Opaque(words + rows_apart);
  }
}

// Scale and softcap, each a pass over the registers behind a uniform branch.
template <typename Traits>
__device__ __forceinline__ void ScaleScores(const AttentionParams& p, ForwardRows<Traits>& rows) {
  constexpr int kColumns = Traits::kKeys / 8;
  const auto each = [&](auto f) {
#pragma unroll
    for (int rb = 0; rb < Traits::kRowBlocks; ++rb) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) f(rows.s[rb][n][e]);
      }
    }
  };
  if (p.softcap > 0.0f) {
    const float cap = p.softcap, inverse = Reciprocal(cap);
    if (cap < kLargeSoftcap) {
      const float factor = p.scale * inverse;
      float largest[4] = {};
#pragma unroll
      for (int rb = 0; rb < Traits::kRowBlocks; ++rb) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) largest[e] = fmaxf(largest[e], fabsf(rows.s[rb][n][e]));
        }
      }
      const float most = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
      if (__any_sync(~0u, most * fabsf(factor) > kSmallTanh)) {
        each([&](float& x) { x = SoftCap(x * (factor * kTwoLog2E), cap); });
      } else {
        const SmallSoftCap small(cap, factor);
        each([&](float& x) { x = small(x); });
      }
    } else {
      each([&](float& x) { x = SoftCapExact(x * p.scale, cap, inverse); });
    }
  } else {
    each([&](float& x) { x *= p.scale; });
  }
}

// Scores from products: scale, softcap and bias where the rules say so, then -inf where a query
// does not attend (`mask`), also by its segment (`segments`). Each rule is one pass over the
// registers behind a uniform branch.
template <typename Traits>
__device__ __forceinline__ void FinishScores(const AttentionParams& p, const Sequence& s,
                                             const ScoreRules& rules, bool mask, bool segments,
                                             int head, ForwardRows<Traits>& rows, int query,
                                             int key, int lane) {
  key += lane % 4 * 2;
  query += lane / 4;
  if (rules.finish) {
    ScaleScores<Traits>(p, rows);
    if (p.bias != nullptr) {
      if (sizeof(typename Traits::T) == 4 || p.bias_dtype == KVBLOCK_F32) {
        AddBias<Traits, float>(p, s, head, rows, query, key);
      } else {
        AddBias<Traits, typename Traits::T>(p, s, head, rows, query, key);
      }
    }
  }
  if (!mask) return;
  MaskPositions<Traits>(s, rows, query, key);
  if (segments) MaskSegments<Traits>(p, s, rows, query, key);
  if (p.tile_masks != nullptr) MaskTileBits<Traits>(p, s, head, rows, query, key);
}

// A value of each of the four lanes that share a row.
__device__ __forceinline__ float RowMax(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float RowSum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// The exponent that a row's scores are taken relative to. A row that has seen nothing yet has no
// maximum; any finite number serves, since its probabilities are all 2^-inf.
__device__ __forceinline__ float Reference(float max, float to_log2) {
  return max == -INFINITY ? 0.0f : max * to_log2;
}

// Writes a row's lse, `top` plus `log_sum`: where a base is asked for, top as the base.
__device__ __forceinline__ void StoreLse(const AttentionParams& p, int64_t row, bool nothing,
                                         float top, float log_sum) {
  const bool based = p.base != nullptr;
  p.lse[row] = nothing ? -INFINITY : based ? log_sum : top + log_sum;
  if (based) p.base[row] = nothing ? 0.0f : top;
}

}  // namespace kvblock
