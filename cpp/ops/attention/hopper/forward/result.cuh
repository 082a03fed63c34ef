// The way out of a warpgroup's rows in Hopper's forward kernel (kernel.cuh): sums, sinks and other
// keys' parts joined; O and lse written.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/fast_math.cuh"
#include "device/ldmatrix.cuh"
#include "device/mma.cuh"
#include "device/stmatrix.cuh"
#include "device/swizzle.cuh"
#include "ops/attention/hopper/forward/rows.cuh"
#include "ops/attention/mask/forward_scores.cuh"

namespace kvblock::hopper {

// O / sum of a warp's rows in 16 bits, to its consumer's place in shared memory.
template <typename Traits>
__device__ __forceinline__ void StageOutput(const float (&factor)[2], Rows<Traits>& rows,
                                            uint32_t place, int warp, int lane) {
  using T = typename Traits::Out;
  const auto& o = rows.state.o[0];
#pragma unroll
  for (int n = 0; n < Traits::kValueDim / 8; n += 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i % 2;
      words[i] =
          Pack<T>(o[n + i / 2][half * 2] * factor[half], o[n + i / 2][half * 2 + 1] * factor[half]);
    }
    const int row = warp * 16 + lane % 16, column = n * 8 + lane / 16 * 8;
    StoreMatrices(place + SwizzledOffset(kConsumerRows, row, column), words);
  }
}

// The query and the head of a row of the tile.
struct RowPlace {
  int query, head;
};
template <typename Traits>
__device__ __forceinline__ RowPlace PlaceOf(const typename Traits::Params& p,
                                            const typename Traits::Item& item, int row) {
  if constexpr (Traits::kPaged) {
    const int query = static_cast<int>(p.by_pack(static_cast<uint32_t>(row)));
    return {item.first + query, item.head + row - query * static_cast<int>(p.by_pack.d)};
  } else {
    return {item.first + row, item.head};
  }
}
// Whether that row of the tile is one of so many queries.
template <typename Traits>
__device__ __forceinline__ bool IsAmong(const typename Traits::Item& item, int row, int query,
                                        int queries) {
  if constexpr (Traits::kPaged) return row < item.rows;
  return query < queries;
}

// The same from the registers to global memory.
template <typename Traits>
__device__ __forceinline__ void StoreOutput(const typename Traits::Params& p,
                                            const typename Traits::Item& item,
                                            const float (&factor)[2], Rows<Traits>& rows, int row,
                                            int lane) {
  using T = typename Traits::Out;
  const Sequence& s = item.sequence;
  // Lanes change half of their columns with their neighbour, so that each has 4 columns side by
  // side, and four lanes write 32 bytes of a row.
  const bool odd = lane % 2 != 0;
  const int column = lane % 2 * 8 + lane % 4 / 2 * 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int of_tile = row + half * 8 + lane / 4;
    const RowPlace at = PlaceOf<Traits>(p, item, of_tile);
    T* const o =
        static_cast<T*>(p.o) +
        ((s.q_row + at.query) * p.num_heads + at.head) * static_cast<int64_t>(p.value_dim) + column;
    const bool there = IsAmong<Traits>(item, of_tile, at.query, s.q_rows);
    const int columns = there ? p.value_dim - column : 0;
#pragma unroll
    for (int n = 0; n < Traits::kValueDim / 8; n += 2) {
      uint32_t words[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words[i] = Pack<T>(rows.state.o[0][n + i][half * 2] * factor[half],
                           rows.state.o[0][n + i][half * 2 + 1] * factor[half]);
      }
      const uint32_t got = __shfl_xor_sync(~0u, odd ? words[0] : words[1], 1);
      if (n * 8 < columns) {
        *reinterpret_cast<uint2*>(o + n * 8) =
            odd ? make_uint2(got, words[1]) : make_uint2(words[0], got);
      }
    }
  }
}

// The lse of one of a thread's rows, of the second in odd lanes: the sum of the two, and
// exponents of 2, but the top is a score where there is a bias. A top of -inf: nothing was seen.
struct RowLse {
  float top, log_sum;
};

// What V's numbers in 8 bits are to be multiplied by.
template <typename Params, typename Item>
__device__ __forceinline__ float ValueScale(const Params& p, const Item& item) {
  if constexpr (std::is_base_of_v<PagedParams, Params>) {
    return HeadScale(p.v_scale, item.kv_head);
  } else {
    return ScaleAt(ScalesOf(p, p.v_scales, item.sequence.batch, p.num_kv_heads, item.kv_head), 0);
  }
}

// Joins the sink. O is to be multiplied by `factor`; it becomes 0 here where a row attends to
// nothing.
template <typename Traits>
__device__ __forceinline__ RowLse FinishRows(const typename Traits::Params& p,
                                             const typename Traits::Item& item, const RowSums& sums,
                                             Rows<Traits>& rows, float (&factor)[2], int row,
                                             int lane) {
  const Sequence& s = item.sequence;
  const bool based = Traits::kHasBases && HasBases(p);
  const float unit = based ? kLog2E : 1.0f;  // of the maxima and of the sink, as exponents of 2
  const auto sink_of = [&](int head) {
    return p.sinks != nullptr
               ? __ldg(p.sinks + int64_t{BatchRow(p, p.sink_batch, s.batch)} * p.num_heads + head) *
                     (based ? 1.0f : kLog2E)
               : -INFINITY;
  };
  const float sink = sink_of(PlaceOf<Traits>(p, item, row + lane / 4).head);
  float sum[2], max[2];
  bool nothing[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (Traits::kNarrow) {
      const bool known = sums.reference[half] == sums.reference[half];
      sum[half] = known ? rows.total[half] : sums.reference[half];
    } else {
      sum[half] = RowSum(sums.sum[half]);
    }
    max[half] = based ? sums.base[half] : sums.reference[half];
    factor[half] = 1.0f;
  }
  if (p.sinks != nullptr) {  // one more score, with no value
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Where rows are of several heads, the second one's may be another.
      const float own = Traits::kPaged && half == 1
                            ? sink_of(PlaceOf<Traits>(p, item, row + 8 + lane / 4).head)
                            : sink;
      const float joint = fmaxf(max[half], own);
      const float reference = Reference(joint, 1.0f);
      factor[half] = Exp2((max[half] - reference) * unit);
      sum[half] = sum[half] * factor[half] + (own == joint ? 1.0f : Exp2((own - reference) * unit));
      if (joint == -INFINITY) sum[half] = 0.0f;
      max[half] = joint;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int of_tile = row + half * 8 + lane / 4, query = item.first + of_tile;
    nothing[half] = sum[half] == 0.0f || !IsAmong<Traits>(item, of_tile, query, s.q_len);
    factor[half] = nothing[half] ? 0.0f : factor[half] * Reciprocal(sum[half]);
    if constexpr (Traits::kNarrow) factor[half] *= nothing[half] ? 1.0f : ValueScale(p, item);
    if constexpr (Traits::kDrops) factor[half] *= p.dropout.scale;
  }
  // A branch, since it is seldom; O may be NaN there.
  if (__any_sync(~0u, nothing[0] || nothing[1])) {
#pragma unroll
    for (int n = 0; n < Traits::kValueDim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = rows.state.o[0][n][e];
        x = nothing[e / 2] ? 0.0f : x;
      }
    }
  }
  const bool second = lane % 2 != 0, none = second ? nothing[1] : nothing[0];
  const float top = second ? max[1] : max[0], log_sum = Log2(second ? sum[1] : sum[0]);
  if constexpr (Traits::kHasBases) return {none ? -INFINITY : top, log_sum};
  return {none ? -INFINITY : top + log_sum, 0.0f};
}

// Of a thread's two rows, joined with what they hold: o becomes factor O + held o. lse, as
// exponents of 2, is -inf where a row attends to nothing here, and keeps what it has.
struct JoinedRows {
  float lse[2], factor[2], held[2];
};

// held_lse: of a consumer's rows.
template <typename Traits>
__device__ __forceinline__ JoinedRows JoinRows(const float* held_lse,
                                               const typename Traits::Item& item,
                                               const RowSums& sums, int row, int lane) {
  JoinedRows joined;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int of_tile = row + half * 8 + lane / 4;
    const float sum = RowSum(sums.sum[half]);
    const bool attends = sum != 0.0f && item.first + of_tile < item.sequence.q_len;
    const float before = held_lse[of_tile % kConsumerRows] * kLog2E;
    const float own = sums.reference[half] + Log2(sum), top = fmaxf(own, before);
    const float own_part = Exp2(own - top), held_part = Exp2(before - top);
    const float all = own_part + held_part;
    joined.lse[half] = attends ? top + Log2(all) : -INFINITY;
    joined.factor[half] = own_part * Reciprocal(all * sum);
    joined.held[half] = held_part * Reciprocal(all);
  }
  return joined;
}

// O joined with what a consumer's place in shared memory holds, in that place.
template <typename Traits>
__device__ __forceinline__ void StageJoined(const JoinedRows& joined, Rows<Traits>& rows,
                                            uint32_t place, int warp, int lane) {
  using T = typename Traits::T;
  const auto& o = rows.state.o[0];
#pragma unroll
  for (int n = 0; n < Traits::kValueDim / 8; n += 2) {
    const int row = warp * 16 + lane % 16, column = n * 8 + lane / 16 * 8;
    const uint32_t at = place + SwizzledOffset(kConsumerRows, row, column);
    uint32_t words[4];
    LoadMatrices(words, at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i % 2;
      const float* const own = o[n + i / 2] + half * 2;
      const float2 x = Unpack<T>(words[i]);
      const uint32_t word = Pack<T>(fmaf(own[0], joined.factor[half], x.x * joined.held[half]),
                                    fmaf(own[1], joined.factor[half], x.y * joined.held[half]));
      words[i] = joined.lse[half] == -INFINITY ? words[i] : word;
    }
    StoreMatrices(at, words);
  }
}

// Writes lse for the rows that attend to something.
template <typename Traits>
__device__ __forceinline__ void StoreJoinedLse(const typename Traits::Params& p,
                                               const typename Traits::Item& item,
                                               const JoinedRows& joined, int row, int lane) {
  const float lse = lane % 2 != 0 ? joined.lse[1] : joined.lse[0];
  const int query = item.first + row + lane % 2 * 8 + lane / 4;
  if (lane % 4 < 2 && lse != -INFINITY) {
    p.lse[item.sequence.LseRow(p, item.head) + query] = lse * kLn2;
  }
}

// Writes lse, and the base, for the rows that exist.
template <typename Traits>
__device__ __forceinline__ void StoreLse(const typename Traits::Params& p,
                                         const typename Traits::Item& item, const RowLse& lse,
                                         int row, int lane) {
  const int of_tile = row + lane % 2 * 8 + lane / 4;
  const RowPlace place = PlaceOf<Traits>(p, item, of_tile);
  if (p.lse != nullptr && lane % 4 < 2 &&
      IsAmong<Traits>(item, of_tile, place.query, item.sequence.q_rows)) {
    int64_t at;
    if constexpr (Traits::kPaged) {
      at = LseIndex(p, item.sequence, place.query, place.head);
    } else {
      at = item.sequence.LseRow(p, item.head) + place.query;
    }
    if constexpr (Traits::kHasBases) {
      const float top = HasBases(p) ? lse.top : lse.top * kLn2;
      StoreLse(p, at, lse.top == -INFINITY, top, lse.log_sum * kLn2);
    } else {
      p.lse[at] = lse.top * kLn2;
    }
  }
}

}  // namespace kvblock::hopper
