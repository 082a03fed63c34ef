// What comes in front of Hopper's forward kernel in 8 bits where keys lie in blocks: queries are
// rounded to e4m3, and V is transposed, of the sequences that the kernel computes. Only the device
// knows which these are.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/narrow.cuh"
#include "ops/attention/hopper/forward/paged_params.cuh"
#include "ops/attention/hopper/forward/transpose_values.cuh"
#include "ops/attention/schedule/long_tiles.cuh"

namespace kvblock::hopper {

// The queries of a tile share a scale: the largest of them becomes 448. What is not finite becomes
// NaN, and has no part in the scale.
struct QueryScale {
  static constexpr float kLargest = 448.0f, kSmallest = 0x1p-126f;

  __device__ __forceinline__ static bool IsFinite(float x) { return fabsf(x) < INFINITY; }
  __device__ __forceinline__ static float Of(float largest) {
    return largest == 0.0f ? 1.0f : fmaxf(largest * (1.0f / kLargest), kSmallest);
  }
  __device__ __forceinline__ static float Scaled(float x, float scale) {
    return IsFinite(x) ? x / scale : __int_as_float(0x7fffffff);
  }
};

// A CTA has a tile of queries of a unit; `tiles` of the grid are as many as there may be. Elements
// of q are bfloat16.
template <int kThreads, int kMostRows>
__global__ void __launch_bounds__(kThreads)
    NarrowQueries(const __grid_constant__ NarrowPagedForwardParams p) {
  constexpr int kMostDim = 128, kPiece = 16;  // numbers that a thread has at a time
  constexpr int kEach = kMostRows * kMostDim / kPiece / kThreads;
  __shared__ int found[2];
  __shared__ float largest_of[kThreads / 32];
  const int unit = blockIdx.y, nth = blockIdx.x;
  if (threadIdx.x < 32) {
    LongTiles long_tiles(p, p.queries);
    int member = -1, tile = 0;
    if (nth < long_tiles.Count()) long_tiles.Find(nth, &member, &tile);
    if (threadIdx.x == 0) {
      found[0] = member;
      found[1] = tile;
    }
  }
  __syncthreads();
  const int member = found[0];
  if (member < 0) return;
  const Sequence s = MemberSequence(p, member);
  const int first = found[1] * p.queries, pack = static_cast<int>(p.by_pack.d);
  const int rows = min(p.queries, s.q_len - first) * pack, pieces = p.head_dim / kPiece;
  const int q_row = static_cast<int>(s.q_row) + first, narrow_row = NarrowRow(p, member, q_row);
  const auto place = [&](int i, int first_row) {
    const int row = i / pieces, query = static_cast<int>(p.by_pack(static_cast<uint32_t>(row)));
    const int head = unit * pack + row - query * pack;
    return (int64_t{first_row + query} * p.num_heads + head) * p.head_dim + i % pieces * kPiece;
  };

  uint32_t held[kEach][kPiece / 2];
  float largest = 0.0f;
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int i = n * kThreads + static_cast<int>(threadIdx.x);
    if (i >= rows * pieces) continue;
    const uint4* const from =
        reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.q) + place(i, q_row));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 four = from[half];
      held[n][half * 4] = four.x;
      held[n][half * 4 + 1] = four.y;
      held[n][half * 4 + 2] = four.z;
      held[n][half * 4 + 3] = four.w;
    }
#pragma unroll
    for (int w = 0; w < kPiece / 2; ++w) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float x = __int_as_float(e == 0 ? held[n][w] << 16 : held[n][w] & 0xffff0000u);
        largest = QueryScale::IsFinite(x) ? fmaxf(largest, fabsf(x)) : largest;
      }
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  }
  if (threadIdx.x % 32 == 0) largest_of[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) largest = fmaxf(largest, largest_of[warp]);
  const float scale = QueryScale::Of(largest);
  if (threadIdx.x == 0) p.q_scales[int64_t{q_row} * p.num_pairs + unit] = scale;
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int i = n * kThreads + static_cast<int>(threadIdx.x);
    if (i >= p.queries * pack * pieces) continue;
    uint32_t words[4] = {};
#pragma unroll
    for (int w = 0; w < 4 && i < rows * pieces; ++w) {
      uint32_t pairs[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32_t two = held[n][w * 2 + e];
        pairs[e] = PairToE4m3(QueryScale::Scaled(__int_as_float(two << 16), scale),
                              QueryScale::Scaled(__int_as_float(two & 0xffff0000u), scale));
      }
      words[w] = pairs[0] | pairs[1] << 16;
    }
    *reinterpret_cast<uint4*>(p.narrow_q + place(i, narrow_row)) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// The tiles of keys that queries of sequences with many of them see, as a warp finds them.
class SeenTiles {
 public:
  __device__ __forceinline__ explicit SeenTiles(const PagedParams& p) : p_(p) {}

  // All lanes together: the member of tile number `nth`, or -1, and which tile of its keys it is.
  // Who asks for higher numbers later is told sooner.
  __device__ __forceinline__ int Find(int nth, int* tile) {
    const int lane = threadIdx.x % 32;
    for (; base_ < p_.batch; base_ += 32) {
      int begin = 0;
      const int tiles = base_ + lane < p_.batch ? Tiles(base_ + lane, &begin) : 0;
      int up_to = tiles;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, up_to, step);
        if (lane >= step) up_to += other;
      }
      const unsigned passed = __ballot_sync(~0u, before_ + up_to > nth);
      if (passed != 0) {
        const int owner = __ffs(passed) - 1;
        *tile = __shfl_sync(~0u, begin + nth - before_ - (up_to - tiles), owner);
        return base_ + owner;
      }
      before_ += __shfl_sync(~0u, up_to, 31);
    }
    return -1;
  }

 private:
  // How many a member has, from tile `begin` on.
  __device__ __forceinline__ int Tiles(int member, int* begin) const {
    const Sequence s = MemberSequence(p_, member);
    int first, end;
    s.VisibleKeys(0, s.q_len, &first, &end);
    if (s.q_len <= 0 || !IsLong(p_, s.q_len) || first >= end) return 0;
    *begin = first / kTransposedKeys;
    return (end + kTransposedKeys - 1) / kTransposedKeys - *begin;
  }

  const PagedParams& p_;
  int base_ = 0, before_ = 0;  // where the last search ended: members, and the tiles of these
};

// V^T of a key head: a CTA takes every gridDim.x-th tile. Keys that are in no block, or that nobody
// sees, become zeros.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    TransposePages(const __grid_constant__ NarrowPagedForwardParams p) {
  constexpr int kPiece = TransposedTile::kPiece;
  __shared__ TransposedTile tile;
  __shared__ int found[2];
  const int head = blockIdx.y, pieces = p.value_dim / kPiece;
  SeenTiles tiles(p);
  for (int nth = blockIdx.x;; nth += static_cast<int>(gridDim.x)) {
    if (threadIdx.x < 32) {
      int number = 0;
      const int member = tiles.Find(nth, &number);
      if (threadIdx.x == 0) {
        found[0] = member;
        found[1] = number;
      }
    }
    __syncthreads();
    const int member = found[0], first = found[1] * kTransposedKeys;
    if (member < 0) return;
    const Sequence s = MemberSequence(p, member);
    int begin, end;
    s.VisibleKeys(0, s.q_len, &begin, &end);
    const int call = static_cast<int>(p.by_sequences(static_cast<uint32_t>(member)));
    const PagedLayer layer = FindLayer(p, p.layer_batch > 1 ? call : 0);
    const int32_t* const table = FindTable(p, member);
    const char* const values = layer.v + int64_t{p.v_strides.head} * head * p.unit;
    for (int i = threadIdx.x; i < kTransposedKeys * pieces; i += kThreads) {
      const int row = i / pieces, column = i % pieces * kPiece, key = first + row;
      uint4 piece{};
      if (layer.there && key >= begin && key < end) {
        const PagedKey at = FindKey(p, table, key);
        if (HasBlock(p, at)) {
          const int64_t bytes = int64_t{PageRow(p.v_strides, at)} * p.unit;
          piece = *reinterpret_cast<const uint4*>(values + bytes + column);
        }
      }
      tile.Take(row, column, piece);
    }
    __syncthreads();
    const int64_t pair = int64_t{member} * p.num_kv_heads + head;
    tile.Write<kThreads>(p.values + pair * p.value_dim * p.padded_keys + first, p.value_dim,
                         p.padded_keys);
    __syncthreads();  // it, and what was found, are free
  }
}

}  // namespace kvblock::hopper
