// From dq_accum to dq: scaled, rounded and in rows. With kAdds dq has what is added first; then
// rows that get nothing are left alone.
//
// A CTA takes 64 queries of a head, which lie in dq_accum as accumulators do in the threads of a
// warpgroup (kernel.cuh). So thread (warp, g, t) reads of each block of 8 columns the columns
// 2 t and 2 t + 1 of rows g and g + 8. Four threads exchange what they have of four blocks, after
// which each has 8 columns of one block, 16 bytes.
#pragma once

#include <cstdint>

#include "device/ldmatrix.cuh"
#include "device/mma.cuh"
#include "device/warpgroup.cuh"
#include "ops/attention/contract/params.cuh"
#include "ops/attention/hopper/backward/dq_state.cuh"
#include "ops/attention/hopper/backward/dq_tile.cuh"
#include "ops/attention/hopper/backward/tiles.h"
#include "ops/attention/mask/tile_walk.cuh"

namespace kvblock::hopper {

// Lane j of a quad gets v[j] of lanes 0 to 3.
__device__ __forceinline__ void TransposeQuad(uint32_t (&v)[4], int t) {
  uint32_t got[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {  // to and from lane t ^ r, whose column there is t ^ r
    const uint32_t low = t & 1 ? v[r ^ 1] : v[r], high = t & 1 ? v[r ^ 3] : v[r ^ 2];
    got[r] = __shfl_xor_sync(~0u, t & 2 ? high : low, r);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t low = t & 1 ? got[j ^ 1] : got[j], high = t & 1 ? got[j ^ 3] : got[j ^ 2];
    v[j] = t & 2 ? high : low;
  }
}

// What 8 columns of dq hold, as a quad's lanes have them before TransposeQuad.
template <typename T>
__device__ __forceinline__ void LoadQuad(const T* from, bool exists, int t, uint32_t (&v)[4]) {
  const uint4 x = exists ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
  v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
  TransposeQuad(v, t);
}
// Two values scaled, with two in 16 bits added.
template <typename T>
__device__ __forceinline__ uint32_t PackSum(float low, float high, float scale, uint32_t more) {
  const float2 x = Unpack<T>(more);
  return Pack<T>(fmaf(low, scale, x.x), fmaf(high, scale, x.y));
}

// The launch's query heads, and the one of an owner among (member, head).
struct FinishedHead {
  int member, head;
};
__device__ __forceinline__ FinishedHead HeadOf(const AttentionParams& p, int owner) {
  const int heads = p.kv_heads * p.group, member = owner / heads;
  return {member, p.first_kv_head * p.group + owner - member * heads};
}

template <typename T, bool kAdds>
__global__ void __launch_bounds__(kWarpgroup)
    AttentionFinishDq(const __grid_constant__ AttentionParams p) {
  const int thread = threadIdx.x, lane = thread % 32, t = lane % 4;
  const int nth = gridDim.x - 1 - blockIdx.x;  // the last heads first: they are still in L2
  const int tile = nth % p.tiles;
  const FinishedHead of = HeadOf(p, nth / p.tiles);
  const int head = of.head;
  Sequence s;
  int first;
  if (!FindTile<Along::kQueries, kDqRows>(p, of.member, tile, &s, &first)) return;
  // A tile that no key sees has not been stored.
  const bool stored =
      first < s.q_len && (p.dq_state == nullptr || *DqState(p, s, head, first) != 0);
  if (kAdds && !stored) return;
  const int row = first + thread / 32 * 16 + lane / 4;
  const float4* const from = reinterpret_cast<const float4*>(DqTile(p, s, head, first)) + thread;
  T* const to = static_cast<T*>(p.dq) + ((s.q_row + row) * p.num_heads + head) * p.head_dim;
  const int64_t eight_rows = int64_t{8} * p.num_heads * p.head_dim;
  const int blocks = p.head_dim / 8;
  constexpr int kQuads = 2;  // of blocks, in flight
  for (int b = 0; b < blocks; b += kQuads * 4) {
    float4 x[kQuads * 4];
#pragma unroll
    for (int i = 0; i < kQuads * 4; ++i) {
      x[i] = stored && b + i < blocks ? __ldcs(from + (b + i) * (kDqRows * 2))
                                      : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int block = b + quad * 4 + t;
        const bool takes_part = row + h * 8 < s.q_len;
        const bool written = row + h * 8 < s.q_rows && block < blocks && (takes_part || !kAdds);
        T* const place = to + h * eight_rows + block * 8;
        uint32_t v[4], held[4] = {};
        if constexpr (kAdds) LoadQuad(place, written, t, held);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4& y = x[quad * 4 + i];
          const float low = h == 0 ? y.x : y.z, high = h == 0 ? y.y : y.w;
          v[i] = kAdds ? PackSum<T>(low, high, p.scale, held[i])
                       : Pack<T>(low * p.scale, high * p.scale);
        }
        TransposeQuad(v, t);
        if (written) {
          *reinterpret_cast<uint4*>(place) =
              takes_part ? make_uint4(v[0], v[1], v[2], v[3]) : make_uint4(0, 0, 0, 0);
        }
      }
    }
  }
}

// The same for a tall launch, whose accumulators hold the transpose: thread (warp, g, t) reads, of
// each block of 8 queries, queries 2 t and 2 t + 1 of columns g and g + 8 of its warp's 16 in each
// half. Turned, four threads have 8 columns of each of four blocks for one query, and exchange.
template <typename T, bool kAdds>
__global__ void __launch_bounds__(kWarpgroup)
    AttentionFinishTallDq(const __grid_constant__ AttentionParams p) {
  const int thread = threadIdx.x, lane = thread % 32, t = lane % 4;
  const int nth = gridDim.x - 1 - blockIdx.x;
  const int tile = nth % p.tiles;
  const FinishedHead of = HeadOf(p, nth / p.tiles);
  const int head = of.head;
  Sequence s;
  int first;
  if (!FindTile<Along::kQueries, kDqRows>(p, of.member, tile, &s, &first)) return;
  // These 64 queries lie in one or two of the tiles that were stored. The first ends at `end`.
  const int lack = FirstLacks<kTallQueries>(s.q_len);
  const int end = ((first + lack) / kTallQueries + 1) * kTallQueries - lack;
  const auto is_stored = [&](int tile_end) {
    return p.dq_state == nullptr || *DqState(p, s, head, min(tile_end, s.q_len) - 1) != 0;
  };
  const bool stored = first < s.q_len && is_stored(end);
  const bool next_stored = end < s.q_len && is_stored(end + kTallQueries);
  if (kAdds && !stored && !next_stored) return;
  const int row = first + lane / 4, column = t / 2 * 64 + thread / 32 * 16 + t % 2 * 8;
  T* const to =
      static_cast<T*>(p.dq) + ((s.q_row + row) * p.num_heads + head) * p.head_dim + column;
  constexpr int kBlocks = kDqRows / 8, kInFlight = 4;
  for (int b = 0; b < kBlocks; b += kInFlight) {
    float4 x[kInFlight][2];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int query = first + (b + i) * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const block = DqTallBlock(p, s, head, query, half);
        const bool exists = query < s.q_len && (query < end ? stored : next_stored);
        x[i][half] = exists ? __ldcs(reinterpret_cast<const float4*>(block) + thread)
                            : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int query = row + (b + i) * 8;
      const bool takes_part = query < s.q_len;
      const bool written = query < s.q_rows && (takes_part || !kAdds);
      T* const place = to + int64_t{b + i} * 8 * p.num_heads * p.head_dim;
      uint32_t v[4], held[4] = {};
      if constexpr (kAdds) LoadQuad(place, written, t, held);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4& y = x[i][half];
        const auto turned = [&](float low, float high, uint32_t more) {
          // Turned there and back: held is in rows of queries, the sums in rows of columns.
          if constexpr (kAdds) {
            return TransposeMatrix(PackSum<T>(low, high, p.scale, TransposeMatrix(more)));
          }
          return TransposeMatrix(Pack<T>(low * p.scale, high * p.scale));
        };
        v[half * 2] = turned(y.x, y.y, held[half * 2]);
        v[half * 2 + 1] = turned(y.z, y.w, held[half * 2 + 1]);
      }
      TransposeQuad(v, t);
      if (written) {
        *reinterpret_cast<uint4*>(place) =
            takes_part ? make_uint4(v[0], v[1], v[2], v[3]) : make_uint4(0, 0, 0, 0);
      }
    }
  }
}

}  // namespace kvblock::hopper
