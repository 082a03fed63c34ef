// How the heads of q, k, v and their like lie in global memory, as tensor maps see them: a base,
// and strides of heads, rows and batch members. (The kernels' own loads have head_rows.cuh.)
#pragma once

#include <cstdint>

#include "host/attention_call.h"
#include "ops/attention/contract/params.cuh"

namespace kvblock {

struct HeadArray {
  const void* data;
  int32_t dtype;                                  // kvblock_dtype; elements of 16 or 8 bits
  int64_t batch, rows, heads, dim;                // of the array
  int64_t batch_stride, row_stride, head_stride;  // in bytes
};

// Dense [batch, rows, heads, dim].
inline HeadArray DenseHeads(const void* data, int32_t dtype, int64_t batch, int64_t rows,
                            int64_t heads, int64_t dim) {
  const int64_t head_stride = dim * (dtype == KVBLOCK_E4M3 || dtype == KVBLOCK_I8 ? 1 : 2);
  const int64_t row_stride = heads * head_stride;
  return {data, dtype, batch, rows, heads, dim, rows * row_stride, row_stride, head_stride};
}

// An array with the rows and heads of q, or with those of k. `dim` is head_dim or value_dim.
inline HeadArray QueryHeads(const AttentionCall& a, const void* data, int32_t dim) {
  return DenseHeads(data, a.dtype, Members(a), a.q_len, a.num_heads, dim);
}
inline HeadArray KeyHeads(const AttentionCall& a, const void* data, int32_t dim) {
  return DenseHeads(data, a.dtype, Members(a), a.kv_len, a.num_kv_heads, dim);
}

}  // namespace kvblock
