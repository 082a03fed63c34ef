// What Hopper's forward kernel is told of operands in 8 bits.
#pragma once

#include <cstdint>

#include "ops/attention/mask/sequence.cuh"
#include "ops/attention/schedule/rounds.cuh"

namespace kvblock::hopper {

constexpr int kScaleRows = KVBLOCK_ATTENTION_SCALE_ROWS;

struct NarrowForwardParams : ForwardParams {
  kvblock_block_scales q_scales, k_scales, v_scales;
};

// The scales of a head, of `heads`: one, or one for each kScaleRows rows.
__device__ __forceinline__ const float* ScalesOf(const AttentionParams& p,
                                                 const kvblock_block_scales& s, int batch,
                                                 int heads, int head) {
  return s.scales + (int64_t{BatchRow(p, s.batch, batch)} * heads + head) * s.blocks;
}

// A scale is not negative; else it is NaN, and so is what comes of it.
__device__ __forceinline__ float ScaleAt(const float* scales, int block) {
  const float scale = __ldg(scales + block);
  return scale >= 0.0f ? scale : __int_as_float(0x7fffffff);
}

}  // namespace kvblock::hopper
