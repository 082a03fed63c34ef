// How many rows the generic kernels' dq_accum has (attention.h says how they lie).
#pragma once

#include <cstdint>

#include "host/attention_call.h"

namespace kvblock::generic {

// Of a head: q's rows of all batch members, in whole blocks of 8.
__host__ __device__ inline int64_t DqRows(const AttentionArrays& a) {
  const int64_t rows = a.cu_q != nullptr ? a.q_len : a.batch * a.q_len;
  return (rows + 7) / 8 * 8;
}

}  // namespace kvblock::generic
