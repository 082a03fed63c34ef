// What travels to the attention kernels: the call and a few derived numbers.
#pragma once

#include <cstdint>

#include "device/fast_math.cuh"
#include "host/attention_call.h"

namespace kvblock {

// Lengths are at most kMaxLength. Then a position, also one in a tile that reaches past the end,
// plus a shift clamped to +-kFar stays inside int32 (mask/sequence.cuh).
constexpr int32_t kFar = 1 << 30, kMaxLength = kFar - 256;

// Batch members of the arrays; packed ones have none.
__host__ __device__ inline int64_t Members(const AttentionArrays& a) {
  return a.cu_q != nullptr ? 1 : a.batch;
}

struct AttentionParams : AttentionArrays {
  int32_t group;  // query heads to a KV head
  int32_t tiles;  // tiles along the queries (or keys) that the launch walks, of all sequences
  int32_t section_pairs;  // whose tiles lie side by side in the grid (schedule/grid_order.cuh)
  int32_t num_pairs;      // of (batch member, head); backward over keys, of (member, KV head)
  int32_t first_kv_head, kv_heads;  // backward over keys: the launch's KV heads
  // With a softcap: from products to exponents of 2, where none is larger than the bound in size.
  TinySoftCap tiny_cap;
  float tiny_bound;
};

inline AttentionParams MakeAttentionParams(const AttentionArrays& a) {
  AttentionParams p{};
  static_cast<AttentionArrays&>(p) = a;
  p.group = a.num_heads / a.num_kv_heads;
  p.num_pairs = a.cu_q != nullptr ? a.num_heads : a.batch * a.num_heads;
  p.section_pairs = 1;
  p.first_kv_head = 0;
  p.kv_heads = a.num_kv_heads;
  if (a.softcap > 0.0f) {
    const float factor = a.scale / a.softcap, size = factor < 0.0f ? -factor : factor;
    const bool served = a.softcap < kLargeSoftcap && size <= kLargestFactor;
    p.tiny_cap = TinySoftCap(a.softcap * kLog2E, factor);
    p.tiny_bound = served ? kTinyTanh / size : -1.0f;
  }
  return p;
}

}  // namespace kvblock
