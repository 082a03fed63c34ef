// Scores of Hopper's forward kernel (kernel.cuh) once more, for rows that have outgrown their
// reference by so much that their probabilities are of no use. It happens at most once in an item;
// so everything comes from global memory, and nobody has to leave room for it.
#pragma once

#include <cstdint>

#include "device/cp_async.cuh"
#include "device/mma.cuh"
#include "ops/attention/hopper/forward/result.cuh"
#include "ops/attention/hopper/forward/rows.cuh"
#include "ops/attention/hopper/forward/shared.cuh"
#include "ops/attention/schedule/pages.cuh"

namespace kvblock::hopper {

// Where a row of the tile has its query, and where a key lies; NULL: there is none.
template <typename Traits>
__device__ __forceinline__ const typename Traits::T* QueryAt(const typename Traits::Params& p,
                                                             const typename Traits::Item& item,
                                                             int row) {
  const RowPlace at = PlaceOf<Traits>(p, item, row);
  const Sequence& s = item.sequence;
  if (!IsAmong<Traits>(item, row, at.query, s.q_rows)) return nullptr;
  const int64_t place = ((s.q_row + at.query) * p.num_heads + at.head) * p.head_dim;
  return static_cast<const typename Traits::T*>(p.q) + place;
}
template <typename Traits>
__device__ __forceinline__ const typename Traits::T* KeyAt(const typename Traits::Params& p,
                                                           const typename Traits::Item& item,
                                                           int key) {
  using T = typename Traits::T;
  const Sequence& s = item.sequence;
  if constexpr (Traits::kPaged) {
    if (key < item.key_begin || key >= item.key_end) return nullptr;
    const int call = p.layer_batch > 1 ? static_cast<int>(p.by_sequences(s.batch)) : 0;
    const PagedLayer layer = FindLayer(p, call);
    const PagedKey at = FindKey(p, s.batch, key);
    if (!layer.there || !HasBlock(p, at)) return nullptr;
    const uint32_t head = p.k_strides.head * static_cast<uint32_t>(item.kv_head);
    return reinterpret_cast<const T*>(
        StepFrom(StepFrom(layer.k, head, p.unit), PageRow(p.k_strides, at), p.unit));
  } else {
    if (key < 0 || key >= s.kv_rows) return nullptr;
    const int64_t place = ((s.kv_row + key) * p.num_kv_heads + item.kv_head) * p.head_dim;
    return static_cast<const T*>(p.k) + place;
  }
}

// Two neighbours of a row; 0 where there is no such row or column.
template <typename T>
__device__ __forceinline__ uint32_t PairAt(const T* row, int column, int columns) {
  return row != nullptr && column < columns ? *reinterpret_cast<const uint32_t*>(row + column) : 0;
}

// This warp's scores of the keys from first_key on, by its own products (device/mma.cuh), whose
// accumulators lie as those of a warpgroup's do. 0 where there is no query of the item or no key.
template <typename Traits>
__device__ __forceinline__ void ScoresAgain(const typename Traits::Params& p,
                                            const typename Traits::Item& item, int first_row,
                                            int first_key, int lane, Rows<Traits>& rows) {
  using T = typename Traits::T;
  constexpr int kSteps = Traits::kQueryDim / 16;
  const int row = first_row + lane / 4;
  const T* const q[2] = {QueryAt<Traits>(p, item, row), QueryAt<Traits>(p, item, row + 8)};
  uint32_t a[kSteps][4];
#pragma unroll
  for (int i = 0; i < kSteps * 4; ++i) {
    const int column = i / 4 * 16 + i % 4 / 2 * 8 + lane % 4 * 2;
    a[i / 4][i % 4] = PairAt(q[i % 2], column, p.head_dim);
  }
  float scores[Traits::kKeys / 2];  // in local memory, as its places are not constants
#pragma unroll 2
  for (int n = 0; n < Traits::kKeys / 8; ++n) {
    const T* const k = KeyAt<Traits>(p, item, first_key + n * 8 + lane / 4);
    float c[4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int column = step * 16 + lane % 4 * 2;
      Mma16x8x16<T>(c, a[step], PairAt(k, column, p.head_dim), PairAt(k, column + 8, p.head_dim));
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[n * 4 + e] = c[e];
  }
#pragma unroll
  for (int i = 0; i < Traits::kKeys / 2; ++i) rows.s()[i] = scores[i];
}

}  // namespace kvblock::hopper
