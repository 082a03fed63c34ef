// Partial tiles: bits that say which queries of a listed tile attend to which of its keys.
#pragma once

#include <cstdint>

#include "ops/attention/mask/sequence.cuh"

namespace kvblock {

// What one tile of tile_masks says of the queries and keys around (query, key): a kernel's tile,
// which lies in one listed tile. Positions count from where the listed tile begins.
class TileBits {
 public:
  __device__ __forceinline__ TileBits() : bits_(nullptr) {}  // nothing
  __device__ __forceinline__ TileBits(const AttentionParams& p, int batch, int head, int query,
                                      int key)
      : bits_(nullptr) {
    if (p.tile_masks == nullptr) return;
    const int row = query / p.tile_q, column = key / p.tile_kv;
    const int rows = static_cast<int>((p.q_len + p.tile_q - 1) / p.tile_q);
    const int columns = static_cast<int>((p.kv_len + p.tile_kv - 1) / p.tile_kv);
    const int64_t list = ListsOf(p, batch, head);
    const int mask = __ldg(p.tile_map + (list * rows + row) * columns + column);
    if (mask < 0) return;
    words_ = p.tile_kv / 32;
    first_query_ = row * p.tile_q;
    first_key_ = column * p.tile_kv;
    bits_ =
        p.tile_masks + static_cast<int64_t>(min(mask, p.num_tile_masks - 1)) * p.tile_q * words_;
  }

  __device__ __forceinline__ bool some() const { return bits_ != nullptr; }
  // The word of a query and a key, which lie in the tile, and where its bit is in it.
  __device__ __forceinline__ const uint32_t* Word(int query, int key) const {
    return bits_ + (query - first_query_) * words_ + (key - first_key_) / 32;
  }
  __device__ __forceinline__ int Shift(int key) const { return (key - first_key_) % 32; }
  __device__ __forceinline__ int words() const { return words_; }  // of a query
  // Those of a query from a key's word on.
  __device__ __forceinline__ int WordsFrom(int key) const {
    return words_ - (key - first_key_) / 32;
  }
  // The bits of a query from a key on, as far as the word goes.
  __device__ __forceinline__ uint32_t From(int query, int key) const {
    return __ldg(Word(query, key)) >> Shift(key);
  }

 private:
  const uint32_t* bits_;
  int words_ = 0, first_query_ = 0, first_key_ = 0;
};

}  // namespace kvblock
