// Dropout of probabilities: which pairs of a query and a key are kept.
//
// kvblock/attention.h defines it, and jax_kvblock/attention/dropout.py computes the same. A word
// serves the four pairs of queries {a, a + 8} and keys {b, b + 8} of a block of 16 by 16, 7 bits
// each. One thread has all four, whether queries are the rows of accumulators (device/mma.cuh) or
// keys are; so it has two words for its eight pairs of a block. Of a word the part of the query and
// that of the key are computed apart, and what two keys side by side have in common once.
//
// Integer arithmetic is what dropout costs: kernels have little time left for it beside the
// exponentials. So a word serves four pairs, keys side by side share half of the hash, and where
// probabilities are in pairs of 16 bits one instruction makes a mask for two.
#pragma once

#include <cstdint>

#include "device/byte_masks.cuh"
#include "ops/attention/contract/params.cuh"
#include "ops/attention/mask/sequence.cuh"

namespace kvblock {

// What a call drops, as kernels take it.
struct Dropout {
  const uint32_t* keys;  // [B, N, 2]; NULL: nothing is dropped
  uint32_t least;        // the number, in each byte, from which on a pair is kept
  float kept, scale;     // the share of the pairs that are kept, and what these are multiplied by
};

inline Dropout MakeDropout(const AttentionCall& a) {
  if (a.dropout == 0) return {nullptr, 0, 1.0f, 1.0f};
  const float kept = static_cast<float>(128 - a.dropout) / 128.0f;
  return {a.dropout_keys, static_cast<uint32_t>(a.dropout) * 0x01010101u, kept, 1.0f / kept};
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
// Of both, of keys whose place is even, and of those whose place is odd.
constexpr uint32_t kSharedFactor = 0x7FEB352Du, kEvenFactor = 0x846CA68Bu, kOddFactor = 0xA54FF53Bu;
constexpr int kDropoutBlock = 16;

// The two words of a sequence and head.
__device__ __forceinline__ uint2 DropoutKey(const Dropout& d, int batch, int num_heads, int head) {
  return __ldg(reinterpret_cast<const uint2*>(d.keys) + (int64_t{batch} * num_heads + head));
}

// The part of a word that a query has: the `nth` of the first eight of the block that begins at
// `first`, a multiple of 16; `key` is that word of the key.
__device__ __forceinline__ uint32_t QueryPart(uint32_t key, int first, int nth) {
  return key + kQueryStep * static_cast<uint32_t>(first / 2 + nth);
}
// The same of a key, and of the one beside it: `nth` is even, or also its odd neighbour.
__device__ __forceinline__ uint32_t KeyPart(uint32_t key, int first, int nth) {
  return key + kKeyStep * static_cast<uint32_t>(first / 4 + nth / 2);
}
// From a block to the next one.
constexpr uint32_t kQueryBlock = kDropoutBlock / 2 * kQueryStep;
constexpr uint32_t kKeyBlock = kDropoutBlock / 4 * kKeyStep;

// What a query has in common with two keys side by side, and the numbers of one of these.
__device__ __forceinline__ uint32_t SharedWord(uint32_t query, uint32_t key) {
  const uint32_t z = (query ^ key) * kSharedFactor;
  return z ^ z >> 15;
}
__device__ __forceinline__ uint32_t Numbers(uint32_t shared, uint32_t factor) {
  const uint32_t z = shared * factor;
  return (z ^ z >> 16) & 0x7f7f7f7fu;
}

// The pairs of a thread in a block of 16 by 16, which are two words: `first` has those of the first
// row or column of its two, `second` of the second one. Byte 2 q + k has that of the queries' half
// q and the keys' half k.
struct DropoutWords {
  uint32_t first, second;  // numbers of 7 bits

  // For two numbers in bfloat16: 1 where a pair is kept, since its number is at least `least`'s, 0
  // elsewhere. (`byte` is a constant where it is used.)
  __device__ __forceinline__ uint32_t Ones(int byte, uint32_t least) const {
    switch (byte) {
      case 0: return OnesFrom<0>(first, second, least);
      case 1: return OnesFrom<1>(first, second, least);
      case 2: return OnesFrom<2>(first, second, least);
      default: return OnesFrom<3>(first, second, least);
    }
  }
};
// The same when it is known which pairs are kept: those whose byte has a top bit.
struct KeptPairs {
  uint32_t first, second;

  KeptPairs() = default;
  __device__ __forceinline__ KeptPairs(const DropoutWords& words, uint32_t least)
      : first(words.first + (0x80808080u - least)), second(words.second + (0x80808080u - least)) {}

  // Ones for two numbers of 16 bits.
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

// Of a query and of the two keys side by side that have this part, or of the two queries from this
// one on and of a key; `factor` is kEvenFactor or kOddFactor, as the key's place is.
__device__ __forceinline__ DropoutWords WordsOfQuery(uint32_t query, uint32_t key) {
  const uint32_t shared = SharedWord(query, key);
  return {Numbers(shared, kEvenFactor), Numbers(shared, kOddFactor)};
}
__device__ __forceinline__ DropoutWords WordsOfKey(uint32_t query, uint32_t key, uint32_t factor) {
  return {Numbers(SharedWord(query, key), factor),
          Numbers(SharedWord(query + kQueryStep, key), factor)};
}

// x where the mask is ones, 0 where it is none.
__device__ __forceinline__ float Masked(float x, uint32_t mask) {
  return __int_as_float(__float_as_int(x) & static_cast<int>(mask));
}

// Of a warp's scores, queries by keys; `other` of its two rows.
struct PairDropout {
  const Dropout& d;
  uint32_t query_part, key_part;  // of this lane's first row and of its first two columns

  // query and key: of the warp's first row and column, multiples of 16.
  __device__ __forceinline__ PairDropout(const DroppingParams& p, const Sequence& s, int head,
                                         int query, int key, int lane)
      : d(p.dropout) {
    const uint2 words = DropoutKey(d, s.batch, p.num_heads, head);
    query_part = QueryPart(words.x, query, lane / 4);
    key_part = KeyPart(words.y, key, lane % 4 * 2);
  }
  // Of block m of 16 rows and block n of 8 columns.
  __device__ __forceinline__ KeptPairs Kept(int m, int n) const {
    return {WordsOfQuery(query_part + m * kQueryBlock, key_part + n / 2 * kKeyBlock), d.least};
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
