// The books of a pool: which blocks are free, who holds the others, and which are found by a key.
//
// They know neither Python nor tensors, so what a pool's books do can be simulated without the
// pool. Every change happens as a whole: what may fail (memory, arguments) comes before what
// changes. A lock is the caller's business; in the Python module it is the GIL.
#ifndef KVBLOCK_OBJECTS_BOOKS_H_
#define KVBLOCK_OBJECTS_BOOKS_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "objects/blake3.h"
#include "objects/key_index.h"

namespace kvblock {

// What of the pool an export shows: a block, and the indices of a part of it (layer, outer).
struct Exported {
  int64_t block;
  std::vector<int64_t> part;
};

// Whose references are counted apart.
enum class Holder { kHandle, kExport, kTable };
constexpr int kHolders = 3;

enum class Policy { kLru, kLfu };

struct Event {
  enum Kind { kStored, kRemoved } kind;
  Digest key, parent;
  std::vector<int32_t> tokens;  // of a block that a table published
  int64_t block;
};

struct Counters {
  int64_t lookups = 0;         // tables that looked for their keys
  int64_t queried_blocks = 0;  // how many keys these had
  int64_t hit_blocks = 0;      // and how many of them were found
  int64_t allocated = 0;
  int64_t published = 0;
  int64_t evicted = 0;
  int64_t duplicates = 0;
  int64_t copied_on_write = 0;
  int64_t refused = 0;  // allocations
};

class Books;

// Who holds blocks. The books know all of them, so that references can be counted again.
class Account {
 public:
  Account(const Account&) = delete;
  Account& operator=(const Account&) = delete;

 protected:
  explicit Account(Books& books);
  ~Account();
  Books& books_;

 private:
  friend class Books;
  // One more in `counts`, of this kind of holder, for each reference.
  virtual void CountIn(std::vector<int64_t>& counts) const = 0;
  virtual Holder holder() const = 0;
  Account *before_, *behind_;
};

// A table's blocks, or some that are held together.
class Several final : public Account {
 public:
  explicit Several(Books& books) : Account(books) {}
  ~Several();

  std::vector<int64_t> blocks;  // kNone where one was given back

 private:
  void CountIn(std::vector<int64_t>& counts) const override;
  Holder holder() const override { return Holder::kTable; }
};

// A handle's block, which it has a reference to already.
class One final : public Account {
 public:
  One(Books& books, int64_t block) : Account(books), block_(block) {}
  ~One();

 private:
  void CountIn(std::vector<int64_t>& counts) const override { ++counts[block_]; }
  Holder holder() const override { return Holder::kHandle; }
  int64_t block_;
};

class Books {
 public:
  static constexpr int64_t kNone = -1;

  explicit Books(int64_t blocks);
  Books(const Books&) = delete;
  Books& operator=(const Books&) = delete;

  int64_t num_blocks() const { return static_cast<int64_t>(references_.size()); }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  int64_t num_idle() const { return num_idle_; }
  int64_t num_available() const { return num_free() + num_idle(); }
  int64_t References(int64_t block) const { return references_[block]; }
  int64_t References(int64_t block, Holder holder) const {
    return counts_[static_cast<int>(holder)][block];
  }
  bool IsPublished(int64_t block) const { return published_[block] != 0; }
  bool IsIdle(int64_t block) const { return IsPublished(block) && references_[block] == 0; }
  bool IsFree(int64_t block) const { return !IsPublished(block) && references_[block] == 0; }
  // Whether others than one holder see what is in it.
  bool IsShared(int64_t block) const { return IsPublished(block) || references_[block] > 1; }

  // What is idle by now keeps its order, and goes first.
  void set_policy(Policy policy);

  // Blocks for a holder; free ones first, then idle ones. All or none: false where there are too
  // few.
  bool Take(int64_t count, Holder holder, int64_t* blocks);
  // One more reference to a block that is not free.
  void Hold(int64_t block, Holder holder);
  void Drop(int64_t block, Holder holder);

  // Of a block that is published.
  const Digest& KeyOf(int64_t block) const { return keys_[block]; }
  // The block that is published under a key, or kNone.
  int64_t Find(const Digest& key) const { return index_.Find(key); }
  // The same for a table's lookup, which counts as a use of it.
  int64_t Match(const Digest& key);
  // Publishes a block that is held; returns it, or the one that has the key already.
  int64_t Publish(int64_t block, const Digest& key, const Digest& parent,
                  std::vector<int32_t> tokens);
  // Nobody finds it any more; it is free if it was idle.
  void Forget(int64_t block);
  void ForgetIdle();
  // Up to `count` idle blocks, the one whose place is taken next first.
  std::vector<int64_t> Victims(int64_t count) const;

  // Exports, oldest first.
  std::map<uint64_t, Exported> live;
  uint64_t next_export = 0;

  bool keeps_events = false;
  std::vector<Event> events;
  Counters counters;

  // What is wrong; nothing if the books are right.
  std::vector<std::string> Check() const;

 private:
  friend class Account;
  static constexpr int kClasses = 16;

  int ClassOf(int64_t block) const;
  void Age(int64_t block);
  void Shelve(int64_t block);
  void Join(int64_t end, int64_t to);
  void Unshelve(int64_t block);
  int64_t NextVictim() const;
  void Evict();
  void ReserveEvents(int64_t count);

  std::vector<int64_t> free_;  // the last one is taken first
  std::vector<int64_t> references_;
  std::array<std::vector<int64_t>, kHolders> counts_;
  std::vector<uint8_t> published_;
  std::vector<Digest> keys_;
  KeyIndex index_;

  // Idle blocks, in lists by how much they are worth; a list begins with who was idle first. Places
  // behind the blocks' own are the lists' ends.
  std::vector<int64_t> before_, behind_;
  int64_t num_idle_ = 0;
  Policy policy_ = Policy::kLru;
  // How often a block was used, as of an age. Ages begin after as many evictions as there are
  // blocks; what was counted before is worth half.
  std::vector<uint32_t> uses_, age_;
  uint32_t present_age_ = 0;
  int64_t evictions_ = 0;  // in this age

  Account* accounts_ = nullptr;
};

}  // namespace kvblock

#endif  // KVBLOCK_OBJECTS_BOOKS_H_
