// Dropout of probabilities: which pairs of a query and a key are kept.
//
// kvblock/attention.h defines it, and jax_kvblock/attention/dropout.py computes the same. A word
// serves the four pairs of queries {a, a + 8} and keys {b, b + 8} of a block of 16 by 16, a byte
// each. One thread has all four, whether queries are the rows of accumulators (device/mma.cuh) or
// keys are; so it has two words for its eight pairs of a block. Of a word the part of the rows and
// that of the columns are computed apart.
#pragma once

#include <cstdint>

#include "device/byte_masks.cuh"
#include "ops/attention/contract/params.cuh"
#include "ops/attention/mask/sequence.cuh"

namespace kvblock {

// What a call drops, as kernels take it.
struct Dropout {
  const uint32_t* keys;  // [B, N, 2]; NULL: nothing is dropped
  // A byte is at least the threshold where the top bit of the larger one of these is 1: of its
  // other bits plus `add`, and itself; or of the smaller one.
  uint32_t add, larger;
  float kept, scale;  // the share of the pairs that are kept, and what these are multiplied by
};

inline Dropout MakeDropout(const AttentionCall& a) {
  if (a.dropout == 0) return {nullptr, 0, 0, 1.0f, 1.0f};
  const auto threshold = static_cast<uint32_t>(a.dropout);
  const bool low = threshold <= 128;
  const uint32_t add = (low ? 128 : 256) - threshold;
  const float kept = static_cast<float>(256 - a.dropout) / 256.0f;
  return {a.dropout_keys, add * 0x01010101u, low ? ~0u : 0u, kept, 1.0f / kept};
}

// Of kernels that have it.
struct DroppingParams : AttentionParams {
  Dropout dropout;
};
inline DroppingParams MakeDroppingParams(const AttentionCall& a) {
  DroppingParams p{};
  static_cast<AttentionParams&>(p) = MakeAttentionParams(a);
  p.dropout = MakeDropout(a);
  return p;
}

constexpr uint32_t kQueryStep = 0x9E3779B9u, kKeyStep = 0x6A09E667u;
constexpr int kDropoutBlock = 16;

// The two words of a sequence and head.
__device__ __forceinline__ uint2 DropoutKey(const Dropout& d, int batch, int num_heads, int head) {
  return __ldg(reinterpret_cast<const uint2*>(d.keys) + (int64_t{batch} * num_heads + head));
}

// The part of a word that the queries, or keys, have that begin at `first`, a multiple of 16, and
// are `nth` of the first eight of their block; `key` is that word of the key.
__device__ __forceinline__ uint32_t DropoutPart(uint32_t key, uint32_t step, int first, int nth) {
  return key + step * static_cast<uint32_t>(first / 2 + nth);
}

// The pairs of a thread in a block of 16 by 16, which are two words: `first` has those of the first
// row or column of its two, `second` of the second one. Byte 2 q + k has that of the queries' half
// q and the keys' half k; its top bit is 1 where the pair is kept.
struct KeptPairs {
  uint32_t first, second;

  // For two numbers of 16 bits. (`byte` is a constant where it is used.)
  __device__ __forceinline__ uint32_t Pair(int byte) const {
    switch (byte) {
      case 0: return PairMask<0>(first, second);
      case 1: return PairMask<1>(first, second);
      case 2: return PairMask<2>(first, second);
      default: return PairMask<3>(first, second);
    }
  }
  // For a float.
  __device__ __forceinline__ uint32_t One(int byte, bool of_second) const {
    const uint32_t word = of_second ? second : first;
    switch (byte) {
      case 0: return WordMask<0>(word);
      case 1: return WordMask<1>(word);
      case 2: return WordMask<2>(word);
      default: return WordMask<3>(word);
    }
  }
};

// Which pairs of a word are kept, by the top bits of its bytes.
__device__ __forceinline__ uint32_t KeptOf(const Dropout& d, uint32_t part, uint32_t other) {
  uint32_t z = part ^ other;
  z *= 0x7FEB352Du;
  z ^= z >> 15;
  z *= 0x846CA68Bu;
  z ^= z >> 16;
  const uint32_t sum = (z & 0x7f7f7f7fu) + d.add;
  return (sum & z) | (d.larger & (sum | z));
}

// `part`: of the row that a thread's two halves have, or column; the others are of the two columns,
// or rows, side by side.
__device__ __forceinline__ KeptPairs KeptPairsOf(const Dropout& d, uint32_t part, uint32_t other,
                                                 uint32_t step) {
  return {KeptOf(d, part, other), KeptOf(d, part, other + step)};
}

// x where the mask is ones, 0 where it is none.
__device__ __forceinline__ float Masked(float x, uint32_t mask) {
  return __int_as_float(__float_as_int(x) & static_cast<int>(mask));
}

// Of a warp's scores, queries by keys; `other` of its two rows.
struct PairDropout {
  const Dropout& d;
  uint32_t row, column;  // the parts of this lane's first row and of its first column

  // query and key: of the warp's first row and column, multiples of 16.
  __device__ __forceinline__ PairDropout(const DroppingParams& p, const Sequence& s, int head,
                                         int query, int key, int lane)
      : d(p.dropout) {
    const uint2 words = DropoutKey(d, s.batch, p.num_heads, head);
    row = DropoutPart(words.x, kQueryStep, query, lane / 4);
    column = DropoutPart(words.y, kKeyStep, key, lane % 4 * 2);
  }
  // Of block m of 16 rows and block n of 8 columns.
  __device__ __forceinline__ KeptPairs Kept(int m, int n) const {
    return KeptPairsOf(d, row + m * (kDropoutBlock / 2) * kQueryStep,
                       column + n / 2 * (kDropoutBlock / 2) * kKeyStep, kKeyStep);
  }
  // Elements of that block (device/mma.cuh) that are dropped become `other`'s.
  __device__ __forceinline__ void Replace(float (&x)[4], int m, int n,
                                          const float (&other)[2]) const {
    const KeptPairs kept = Kept(m, n);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[e] = kept.One(e / 2 * 2 + n % 2, e % 2) != 0 ? x[e] : other[e / 2];
    }
  }
  // They become 0.
  __device__ __forceinline__ void Drop(float (&x)[4], int m, int n) const {
    const KeptPairs kept = Kept(m, n);
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = Masked(x[e], kept.One(e / 2 * 2 + n % 2, e % 2));
  }
};

}  // namespace kvblock
