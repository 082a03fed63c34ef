// From keys to blocks: a hash table that is made once, for as many keys as there are blocks.
#ifndef KVBLOCK_OBJECTS_KEY_INDEX_H_
#define KVBLOCK_OBJECTS_KEY_INDEX_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "objects/blake3.h"

namespace kvblock {

// Linear probing, at most half full. The keys themselves are the blocks'.
class KeyIndex {
 public:
  explicit KeyIndex(const std::vector<Digest>& keys) : keys_(keys) {
    size_t places = 4;
    while (places < 2 * keys.size()) places *= 2;
    blocks_.assign(places, kNone);
    mask_ = places - 1;
  }
  KeyIndex(const KeyIndex&) = delete;
  KeyIndex& operator=(const KeyIndex&) = delete;

  static constexpr int64_t kNone = -1;

  int64_t Find(const Digest& key) const {
    for (size_t at = Home(key); blocks_[at] != kNone; at = Next(at))
      if (keys_[blocks_[at]] == key) return blocks_[at];
    return kNone;
  }
  int64_t size() const {
    return static_cast<int64_t>(blocks_.size()) - std::count(blocks_.begin(), blocks_.end(), kNone);
  }
  // Whose key is in none of the others.
  void Insert(int64_t block) {
    size_t at = Home(keys_[block]);
    while (blocks_[at] != kNone) at = Next(at);
    blocks_[at] = block;
  }
  void Erase(int64_t block) {
    size_t hole = Home(keys_[block]);
    while (blocks_[hole] != block) hole = Next(hole);
    // Who stands behind the hole moves into it, unless that is in front of its home.
    for (size_t at = Next(hole); blocks_[at] != kNone; at = Next(at)) {
      const size_t home = Home(keys_[blocks_[at]]);
      if (((at - home) & mask_) >= ((at - hole) & mask_)) {
        blocks_[hole] = blocks_[at];
        hole = at;
      }
    }
    blocks_[hole] = kNone;
  }

 private:
  // Keys are hashes already.
  size_t Home(const Digest& key) const {
    uint64_t bits;
    std::memcpy(&bits, key.data(), sizeof bits);
    return static_cast<size_t>(bits) & mask_;
  }
  size_t Next(size_t at) const { return (at + 1) & mask_; }

  const std::vector<Digest>& keys_;
  std::vector<int64_t> blocks_;
  size_t mask_ = 0;
};

}  // namespace kvblock

#endif  // KVBLOCK_OBJECTS_KEY_INDEX_H_
