// From products q.k to probabilities in the backward kernels, one score at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/fast_math.cuh"
#include "ops/attention/generic/mask.cuh"

namespace kvblock {

// exp(scale * product - lse) without softcap, bias and mask. The difference is rounded only once.
__device__ __forceinline__ float Probability(float product, float scale, float lse) {
  constexpr float kLog2E = 1.4426950408889634f;
  return Exp2(fmaf(product, scale, -lse) * kLog2E);
}

// What is subtracted from a row's scores: its lse, or inf where the row sees nothing, so that its
// probabilities are exp(-inf) = 0.
__device__ __forceinline__ float RowLse(float lse) { return lse == -INFINITY ? INFINITY : lse; }

// Its delta. A row that sees nothing has none, whatever its gradients hold.
__device__ __forceinline__ float RowDelta(float lse, float delta) {
  return lse == -INFINITY ? 0.0f : delta;
}

// The scores of one sequence and head, with all their options.
template <typename T>
class Scores {
 public:
  __device__ __forceinline__ Scores(const AttentionParams& p, const Sequence& s, int head)
      : p_(p), s_(s), bias_row_(0) {
    if (p.bias != nullptr) {
      const int64_t bb = BatchRow(p, p.bias_batch, s.batch), bn = p.bias_heads > 1 ? head : 0;
      bias_row_ = (bb * p.bias_heads + bn) * p.q_len;
    }
  }

  __device__ __forceinline__ bool Attends(int query, int key) const {
    if (!s_.Attends(query, key)) return false;
    return p_.q_segments == nullptr || __ldg(p_.q_segments + s_.batch * p_.q_len + query) ==
                                           __ldg(p_.kv_segments + s_.batch * p_.kv_len + key);
  }

  // The probability of (query, key), 0 where it is masked. *slope is the derivative of the score
  // before the bias by scale * product: 1 without softcap.
  __device__ __forceinline__ float Probability(float product, int query, int key, float lse,
                                               float* slope) const {
    *slope = 1.0f;
    if (!Attends(query, key)) return 0.0f;
    if (p_.softcap == 0.0f && p_.bias == nullptr) {
      return kvblock::Probability(product, p_.scale, lse);
    }
    float score = product * p_.scale;
    if (p_.softcap > 0.0f) {
      const float capped = Tanh(score / p_.softcap);
      *slope = 1.0f - capped * capped;
      score = p_.softcap * capped;
    }
    if (p_.bias != nullptr) score += Bias((bias_row_ + query) * p_.kv_len + key);
    return kvblock::Probability(score, 1.0f, lse);
  }

 private:
  __device__ __forceinline__ float Bias(int64_t i) const {
    if (p_.bias_dtype == KVBLOCK_F32) return __ldg(static_cast<const float*>(p_.bias) + i);
    if constexpr (std::is_same_v<T, __half>) {
      return __half2float(static_cast<const __half*>(p_.bias)[i]);
    } else {
      return __bfloat162float(static_cast<const __nv_bfloat16*>(p_.bias)[i]);
    }
  }

  const AttentionParams& p_;
  const Sequence& s_;
  int64_t bias_row_;
};

}  // namespace kvblock
