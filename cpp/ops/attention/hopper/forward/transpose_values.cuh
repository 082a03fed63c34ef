// V of 8 bits as the products of Hopper's forward kernel want it: transposed, since their operands
// lie across, and every 16 keys in the order in which a lane has their probabilities (rows.cuh).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/attention/hopper/forward/narrow_params.cuh"

namespace kvblock::hopper {

constexpr int kTransposedKeys = 128;  // that a CTA has at a time; a row of V^T is so many, or more

struct TransposeParams {
  const uint8_t* v;  // [batch, keys, heads, dim], packed calls as one member
  uint8_t* to;       // [batch, heads, dim, padded]
  const int32_t* kv_lens;
  int32_t heads, dim;
  int64_t keys, padded;  // padded: a multiple of kTransposedKeys
};

// Which of 16 keys is at a place.
__device__ __forceinline__ constexpr int KeyAt(int place) {
  return place % 4 / 2 * 8 + place / 4 * 2 + place % 2;
}

// A tile of keys on its way: rows of as many words as leave no bank to two of a warp.
struct TransposedTile {
  static constexpr int kMostDim = 128, kPiece = 16, kRowBytes = kMostDim + 4;
  uint32_t words[kTransposedKeys * kRowBytes / 4];

  __device__ __forceinline__ void Take(int key, int column, const uint4& piece) {
    uint32_t* const to = words + (key * kRowBytes + column) / 4;
    to[0] = piece.x;
    to[1] = piece.y;
    to[2] = piece.z;
    to[3] = piece.w;
  }

  // Writes it to where a head's first column has its first key.
  template <int kThreads>
  __device__ __forceinline__ void Write(uint8_t* rows, int dim, int64_t padded) const {
    const uint8_t* const bytes = reinterpret_cast<const uint8_t*>(words);
    constexpr int kGroups = kTransposedKeys / 16;
    for (int i = threadIdx.x; i < dim * kGroups; i += kThreads) {
      const int column = i / kGroups, group = i % kGroups;
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words[w] = 0;
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const uint32_t byte = bytes[(group * 16 + KeyAt(w * 4 + b)) * kRowBytes + column];
          words[w] |= byte << (b * 8);
        }
      }
      *reinterpret_cast<uint4*>(rows + column * padded + group * 16) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
};

// Keys that do not exist, or that nobody may see, become zeros: a probability of 0 does not cancel
// a NaN.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    TransposeValues(const __grid_constant__ TransposeParams p) {
  constexpr int kPiece = TransposedTile::kPiece;
  __shared__ TransposedTile tile;
  const int head = blockIdx.y, batch = blockIdx.z;
  const int64_t first = int64_t{blockIdx.x} * kTransposedKeys;
  const int64_t seen = p.kv_lens != nullptr ? min(p.keys, int64_t{p.kv_lens[batch]}) : p.keys;
  const int pieces = p.dim / kPiece;
  for (int i = threadIdx.x; i < kTransposedKeys * pieces; i += kThreads) {
    const int key = i / pieces, column = i % pieces * kPiece;
    uint4 piece{};
    if (first + key < seen) {
      const int64_t row = (int64_t{batch} * p.keys + first + key) * p.heads + head;
      piece = *reinterpret_cast<const uint4*>(p.v + row * p.dim + column);
    }
    tile.Take(key, column, piece);
  }
  __syncthreads();
  uint8_t* const rows = p.to + (int64_t{batch} * p.heads + head) * p.dim * p.padded + first;
  tile.Write<kThreads>(rows, p.dim, p.padded);
}

}  // namespace kvblock::hopper
