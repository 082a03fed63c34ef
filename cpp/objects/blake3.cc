#include "objects/blake3.h"

#include <algorithm>
#include <cstring>

namespace kvblock {
namespace {

constexpr size_t kBlock = 64, kChunk = 1024;  // bytes
enum Flag : uint32_t {
  kChunkStart = 1,
  kChunkEnd = 2,
  kParent = 4,
  kRoot = 8,
  kKeyed = 16,
};
constexpr uint32_t kInitial[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                  0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};
// Which word of the message each step of a round takes; between rounds words change places.
constexpr int kRounds = 7;
struct Schedule {
  int word[kRounds][16] = {};
  constexpr Schedule() {
    constexpr int kMoved[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
    for (int i = 0; i < 16; ++i) word[0][i] = i;
    for (int round = 1; round < kRounds; ++round)
      for (int i = 0; i < 16; ++i) word[round][i] = word[round - 1][kMoved[i]];
  }
};
constexpr Schedule kSchedule;

struct Words {
  uint32_t word[8];
};

inline uint32_t Rotated(uint32_t x, int bits) { return (x >> bits) | (x << (32 - bits)); }

inline void Mix(uint32_t* v, int a, int b, int c, int d, uint32_t x, uint32_t y) {
  v[a] = v[a] + v[b] + x;
  v[d] = Rotated(v[d] ^ v[a], 16);
  v[c] = v[c] + v[d];
  v[b] = Rotated(v[b] ^ v[c], 12);
  v[a] = v[a] + v[b] + y;
  v[d] = Rotated(v[d] ^ v[a], 8);
  v[c] = v[c] + v[d];
  v[b] = Rotated(v[b] ^ v[c], 7);
}

inline uint32_t Little(const uint8_t* at) {
  return at[0] | uint32_t{at[1]} << 8 | uint32_t{at[2]} << 16 | uint32_t{at[3]} << 24;
}

// One block of a message: what was before it goes in, what comes out is for the next one.
Words Compress(const Words& before, const uint8_t block[kBlock], uint64_t counter, uint32_t size,
               uint32_t flags) {
  uint32_t m[16];
  for (int i = 0; i < 16; ++i) m[i] = Little(block + 4 * i);
  uint32_t v[16];
  std::copy_n(before.word, 8, v);
  std::copy_n(kInitial, 4, v + 8);
  v[12] = static_cast<uint32_t>(counter);
  v[13] = static_cast<uint32_t>(counter >> 32);
  v[14] = size;
  v[15] = flags;
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC unroll 7
#endif
  for (int round = 0; round < kRounds; ++round) {
    const int* s = kSchedule.word[round];
    Mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
    Mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
    Mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
    Mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
    Mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
    Mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
    Mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
    Mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
  }
  Words out;
  for (int i = 0; i < 8; ++i) out.word[i] = v[i] ^ v[i + 8];
  return out;
}

void Write(const Words& words, uint8_t* to) {
  for (int i = 0; i < 8; ++i)
    for (int byte = 0; byte < 4; ++byte)
      to[4 * i + byte] = static_cast<uint8_t>(words.word[i] >> (8 * byte));
}

struct Hash {
  Words key;
  uint32_t mode;

  // Up to 1024 bytes, the chunk of this number in the message.
  Words Chunk(const uint8_t* data, size_t size, uint64_t number, uint32_t root) const {
    Words words = key;
    for (size_t at = 0;; at += kBlock) {
      const size_t count = std::min(kBlock, size - at);
      const bool last = at + count == size;
      const uint32_t flags = mode | (at == 0 ? kChunkStart : 0u) | (last ? kChunkEnd | root : 0u);
      uint8_t padded[kBlock] = {};
      const uint8_t* block = data + at;
      if (count < kBlock) {
        if (count > 0) std::memcpy(padded, block, count);
        block = padded;
      }
      words = Compress(words, block, number, static_cast<uint32_t>(count), flags);
      if (last) return words;
    }
  }
  // A binary tree of chunks: on the left as many as fill the largest whole tree that leaves some.
  Words Tree(const uint8_t* data, size_t size, uint64_t number, uint32_t root) const {
    if (size <= kChunk) return Chunk(data, size, number, root);
    size_t left = kChunk;
    while (2 * left < size) left *= 2;
    uint8_t both[kBlock];
    Write(Tree(data, left, number, 0), both);
    Write(Tree(data + left, size - left, number + left / kChunk, 0), both + 32);
    return Compress(key, both, 0, kBlock, mode | kParent | root);
  }
};

}  // namespace

Digest Blake3(const void* data, size_t size, const Digest* key) {
  Hash hash{};
  std::copy_n(kInitial, 8, hash.key.word);
  if (key != nullptr) {
    for (int i = 0; i < 8; ++i) hash.key.word[i] = Little(key->data() + 4 * i);
    hash.mode = kKeyed;
  }
  Digest out;
  Write(hash.Tree(static_cast<const uint8_t*>(data), size, 0, kRoot), out.data());
  return out;
}

}  // namespace kvblock
