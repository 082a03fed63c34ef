// What a part of the keys comes to for a row of queries, and where that goes: to the result, or
// to memory until the other parts are there (combine.cuh).
#pragma once

#include <cstdint>

#include "device/fast_math.cuh"
#include "device/mma.cuh"
#include "ops/attention/mask/forward_scores.cuh"
#include "ops/attention/schedule/packed_rows.cuh"
#include "ops/attention/schedule/shares.cuh"

namespace kvblock {

// Of a row: the largest exponent of 2 (-inf: nothing was seen), and the sum of 2^(exponent - max).
struct PartialSum {
  float max, sum;
};

// Four columns of sum_j 2^(exponent - max) v, beside the sum.
struct PartialRow {
  PartialSum sums;
  float o[4];

  __device__ __forceinline__ void Add(float4 x, float factor) {
    o[0] = fmaf(x.x, factor, o[0]);
    o[1] = fmaf(x.y, factor, o[1]);
    o[2] = fmaf(x.z, factor, o[2]);
    o[3] = fmaf(x.w, factor, o[3]);
  }
};

// 1 / sum, 0 for 0.
__device__ __forceinline__ float Share(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

// `at`: the piece's row among those of all pieces.
__device__ __forceinline__ void StorePieceLse(const ShareParams& p, int64_t at,
                                              const PartialSum& sums) {
  p.piece_lse[at] = sums.sum == 0.0f ? -INFINITY : sums.max + Log2(sums.sum);
}

__device__ __forceinline__ void StorePiece(const ShareParams& p, unsigned slot, int row, int column,
                                           const PartialRow& result) {
  const int64_t at = static_cast<int64_t>(slot) * p.rows + row;
  const float share = Share(result.sums.sum);
  *reinterpret_cast<float4*>(p.piece_o + at * p.value_dim + column) = make_float4(
      result.o[0] * share, result.o[1] * share, result.o[2] * share, result.o[3] * share);
  if (column == 0) StorePieceLse(p, at, result.sums);
}

// Where four columns of a row of O go, and with the first of them lse.
template <typename T>
class ResultRow {
 public:
  template <typename Params>
  __device__ __forceinline__ ResultRow(const Params& p, const Sequence& s, const PackedRows& packed,
                                       int row, int column)
      : params_(p), sink_(0.0f) {
    const int query = packed.Query(row), head = packed.Head(row);
    attends_ = query < s.q_len;
    if (p.sinks != nullptr) {
      const int64_t of = static_cast<int64_t>(BatchRow(p, p.sink_batch, s.batch)) * p.num_heads;
      sink_ = __ldg(p.sinks + of + head) * kLog2E;
    }
    o_ = static_cast<T*>(p.o) + packed.Index(s, row) * p.value_dim + column;
    lse_row_ = p.lse != nullptr && column == 0 ? LseIndex(p, s, query, head) : -1;
  }

  __device__ __forceinline__ void Write(PartialRow result) const {
    const float factor = Finish(&result.sums);
    const bool nothing = result.sums.sum == 0.0f;
    const auto value = [&](int i) { return nothing ? 0.0f : result.o[i] * factor; };
    Store(0, make_uint2(Pack<T>(value(0), value(1)), Pack<T>(value(2), value(3))));
    WriteLse(result.sums);
  }

  // Joins the sink. O is to be multiplied by what comes back; where the sum has become 0 it is 0,
  // whatever there is of it.
  __device__ __forceinline__ float Finish(PartialSum* of_row) const {
    float factor = 1.0f;
    PartialSum& sums = *of_row;
    if (params_.sinks != nullptr) {  // one more score, with no value
      const float joint = fmaxf(sums.max, sink_), reference = Reference(joint, 1.0f);
      factor = Exp2(sums.max - reference);
      sums.sum = sums.sum * factor + (sink_ == joint ? 1.0f : Exp2(sink_ - reference));
      if (joint == -INFINITY) sums.sum = 0.0f;
      sums.max = joint;
    }
    if (!attends_) sums.sum = 0.0f;
    return factor * Share(sums.sum);
  }
  // Four columns, so many further on.
  __device__ __forceinline__ void Store(int further, uint2 columns) const {
    *reinterpret_cast<uint2*>(o_ + further) = columns;
  }
  __device__ __forceinline__ void WriteLse(const PartialSum& sums) const {
    if (lse_row_ < 0) return;
    StoreLse(params_, lse_row_, sums.sum == 0.0f, sums.max * kLn2, logf(sums.sum));
  }

 private:
  const ShareParams& params_;
  T* o_;
  int64_t lse_row_;  // -1: not this one
  float sink_;       // as an exponent of 2
  bool attends_;
};

}  // namespace kvblock
