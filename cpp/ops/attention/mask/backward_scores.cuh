// From products q.k to probabilities in the backward kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/fast_math.cuh"
#include "ops/attention/mask/sequence.cuh"
#include "ops/attention/mask/tile_bits.cuh"

namespace kvblock {

// exp(scale * product - lse) without softcap, bias and mask. The difference is rounded only once.
__device__ __forceinline__ float Probability(float product, float scale, float lse) {
  return Exp2(fmaf(product, scale, -lse) * kLog2E);
}

// A score is hardly above its row's base. Where large scores lie far apart, one may round up here
// that rounded down in the forward pass: it must not become a probability without bounds.
constexpr float kMostAboveBase = 8.0f;

// What is subtracted from a row's scores: its lse, or inf where the row sees nothing, so that its
// probabilities are exp(-inf) = 0.
__device__ __forceinline__ float RowLse(float lse) { return lse == -INFINITY ? INFINITY : lse; }

// Its delta. A row that sees nothing has none, whatever its gradients hold.
__device__ __forceinline__ float RowDelta(float lse, float delta) {
  return lse == -INFINITY ? 0.0f : delta;
}

// The scores of one sequence and head, with all their options. Accumulators hold queries by keys,
// or, transposed, keys by queries. kPartial: there may be partial tiles.
template <typename T, bool kTransposed = false, bool kPartial = true>
class Scores {
 public:
  // query and key: of the tile that is computed.
  __device__ __forceinline__ Scores(const AttentionParams& p, const Sequence& s, int head,
                                    int query, int key)
      : p_(p), s_(s), bias_row_(0), base_row_(0) {
    if constexpr (kPartial) bits_ = TileBits(p, s.batch, head, query, key);
    if (p.bias != nullptr) {
      const int64_t bb = BatchRow(p, p.bias_batch, s.batch), bn = p.bias_heads > 1 ? head : 0;
      bias_row_ = (bb * p.bias_heads + bn) * p.q_len;
      base_row_ = s.LseRow(p, head);
    }
  }

  // Turns a block of accumulators (device/mma.cuh) from products into probabilities, 0 where
  // masked. c[0] belongs to (query, key), c[1] to the next key, c[2] and c[3] to the query 8
  // further on (transposed: the next query, the key 8 further on); lse[i] to its two queries.
  // slope[e] becomes the derivative of the score before the bias by scale * product: 1 without
  // softcap.
  //
  // Each option is a uniform branch, and what it loads it loads for masked scores too, from inside
  // of the array, so that no load waits for another.
  template <bool kSoftcap>
  __device__ __forceinline__ void Probabilities(float (&c)[4], int query, int key,
                                                const float (&lse)[2], float (&slope)[4]) const {
    bool attends[4];
    float scale = p_.scale;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      attends[e] = s_.Attends(query + Row(e) * kRowStep, key + Column(e) * kColumnStep);
      slope[e] = 1.0f;
    }
    const int rows[2] = {min(query, s_.q_rows - 1), min(query + kRowStep, s_.q_rows - 1)};
    const int columns[2] = {min(key, s_.kv_rows - 1), min(key + kColumnStep, s_.kv_rows - 1)};
    if (p_.q_segments != nullptr) {
      const int32_t* q = p_.q_segments + s_.q_row;
      const int32_t* kv = p_.kv_segments + s_.kv_row;
      const int of_row[2] = {__ldg(q + rows[0]), __ldg(q + rows[1])};
      const int of_column[2] = {__ldg(kv + columns[0]), __ldg(kv + columns[1])};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        attends[e] = attends[e] && of_row[Row(e)] == of_column[Column(e)];
      }
    }
    if (kPartial && bits_.some()) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = query + Row(e) * kRowStep, j = key + Column(e) * kColumnStep;
        attends[e] = attends[e] && (bits_.From(i, j) & 1) != 0;
      }
    }
    if constexpr (kSoftcap) {
      const float inverse = Reciprocal(p_.softcap);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        c[e] = SoftCapExact(c[e] * scale, p_.softcap, inverse);
        slope[e] = fmaf(-c[e] * inverse, c[e] * inverse, 1.0f);
      }
      scale = 1.0f;
    }
    if (p_.bias != nullptr) {
      const float base[2] = {Base(rows[0]), Base(rows[1])};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float score =
            fmaf(c[e], scale, Bias((bias_row_ + rows[Row(e)]) * p_.kv_len + columns[Column(e)]));
        const float above = score - base[Row(e)];
        c[e] = p_.base != nullptr && above > kMostAboveBase ? kMostAboveBase : above;
      }
      scale = 1.0f;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      c[e] = attends[e] ? Probability(c[e], scale, lse[Row(e)]) : 0.0f;
    }
  }

  // The same where registers are plenty.
  __device__ __forceinline__ void Probabilities(float (&c)[4], int query, int key,
                                                const float (&lse)[2], float (&slope)[4]) const {
    if (p_.softcap > 0.0f) {
      Probabilities<true>(c, query, key, lse, slope);
    } else {
      Probabilities<false>(c, query, key, lse, slope);
    }
  }

 private:
  // Which of the block's two queries and of its two keys element e belongs to.
  __device__ static constexpr int Row(int e) { return kTransposed ? e % 2 : e / 2; }
  __device__ static constexpr int Column(int e) { return kTransposed ? e / 2 : e % 2; }
  static constexpr int kRowStep = kTransposed ? 1 : 8, kColumnStep = kTransposed ? 8 : 1;

  __device__ __forceinline__ float Bias(int64_t i) const {
    if (sizeof(T) == 4 || p_.bias_dtype == KVBLOCK_F32) {
      return __ldg(static_cast<const float*>(p_.bias) + i);
    }
    return static_cast<float>(static_cast<const T*>(p_.bias)[i]);
  }

  __device__ __forceinline__ float Base(int row) const {
    return p_.base != nullptr ? __ldg(p_.base + base_row_ + row) : 0.0f;
  }

  const AttentionParams& p_;
  const Sequence& s_;
  TileBits bits_;
  int64_t bias_row_, base_row_;
};

}  // namespace kvblock
