// Tables of sequences: their blocks in order, and the keys of what these hold.
//
// As the books, they know no Python: what is refused is a std::invalid_argument or a
// std::out_of_range, and then nothing has changed.
#ifndef KVBLOCK_OBJECTS_TABLE_H_
#define KVBLOCK_OBJECTS_TABLE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "objects/books.h"

namespace kvblock {

// The key of a block that holds these tokens, and follows the one of the key `parent`.
Digest KeyOf(const Digest& parent, const int32_t* tokens, int64_t count);

// Blocks that are held together, given back when this is released.
class Hold {
 public:
  explicit Hold(std::shared_ptr<Books> books)
      : books_(std::move(books)), account_(std::make_unique<Several>(*books_)) {}

  void Release() { account_.reset(); }
  bool released() const { return account_ == nullptr; }
  const std::shared_ptr<Books>& books() const { return books_; }
  std::vector<int64_t>& blocks() const;

  // Free or idle blocks, behind those that are here. All or none.
  bool Take(int64_t count);
  // One more reference to each of these, which are not free.
  void Add(const std::vector<int64_t>& blocks);

 private:
  std::shared_ptr<Books> books_;
  std::unique_ptr<Several> account_;
};

// The blocks of one sequence. Block i has tokens i * block_size and after; those that are full have
// keys, each made from the one before.
class Table {
 public:
  Table(std::shared_ptr<Books> books, const Digest& root, int64_t block_size)
      : hold_(std::move(books)), root_(root), size_(block_size) {}

  int64_t block_size() const { return size_; }
  int64_t num_tokens() const { return static_cast<int64_t>(tokens_.size()); }
  int64_t num_committed() const { return committed_ * size_; }
  int64_t num_cached() const { return cached_ * size_; }
  int64_t size() const { return static_cast<int64_t>(blocks().size()); }
  const std::vector<int32_t>& tokens() const { return tokens_; }
  const std::vector<Digest>& keys() const { return keys_; }
  const Digest& root() const { return root_; }
  // kNone where one was given back.
  std::vector<int64_t>& blocks() const;
  Books& books() const { return *hold_.books(); }
  const std::shared_ptr<Books>& shared_books() const { return hold_.books(); }
  bool released() const { return hold_.released(); }
  void Release() { hold_.Release(); }

  void Append(const int32_t* tokens, int64_t count);
  // Takes the blocks that follow its own and are published, for at most the first `limit` tokens;
  // returns how many tokens are cached by now.
  int64_t Match(int64_t limit);
  // Blocks for so many tokens, with `spare` ones left to others; false where there are too few.
  bool Reserve(int64_t num_tokens, int64_t spare);
  // Publishes the blocks that these tokens fill. Returns the places whose block was one of the same
  // key and is that one now.
  std::vector<int64_t> Commit(int64_t num_tokens);
  void CheckCommit(int64_t num_tokens) const;

  // For many tables at once (step.h). How many blocks are missing for these tokens, which may be
  // written where there is a block already, in a page table of `width`; and room for as many.
  int64_t CheckStep(int64_t start, int64_t count, int64_t width) const;
  void MakeRoom(int64_t missing);
  // Takes over references to as many as so many tokens need; returns what follows them.
  const int64_t* Adopt(const int64_t* fresh, int64_t num_tokens);
  void WriteSlots(int64_t start, int64_t count, int32_t* slots) const;
  void WritePageTable(int64_t width, int32_t* table) const;

  std::vector<int32_t> PageTable(int64_t width) const;
  std::vector<int32_t> Slots(int64_t start, int64_t count) const;
  // The places of these tokens whose block others see, too.
  std::vector<int64_t> Shared(int64_t start, int64_t count) const;
  // Puts the blocks of a hold into these places, and gives back what was there.
  void Put(const std::vector<int64_t>& places, Hold& hold);
  // A reference to some of its blocks, for a copy in flight.
  std::unique_ptr<Hold> HoldSome(const std::vector<int64_t>& places) const;
  std::unique_ptr<Table> Fork() const;

  // The first blocks are behind a window: the table begins after them.
  void Skip(int64_t count);
  // Gives back what was reserved beyond so many blocks.
  void Shrink(int64_t count);
  void FreeBefore(int64_t token);
  void Truncate(int64_t num_tokens);

 private:
  int64_t BlocksFor(int64_t num_tokens) const {
    return num_tokens / size_ + (num_tokens % size_ > 0 ? 1 : 0);
  }
  const Digest& Parent(int64_t place) const {
    return place == 0 ? root_ : keys_[static_cast<size_t>(place) - 1];
  }
  void CheckTokens(const char* where, int64_t start, int64_t count) const;
  void CheckPlaces(const char* where, const std::vector<int64_t>& places) const;
  void CheckContents(int64_t end) const;
  void CheckWritable(const char* where, int64_t start, int64_t count) const;
  void CheckWidth(int64_t blocks, int64_t width) const;
  void DropBehind(int64_t count);

  Hold hold_;
  Digest root_;
  int64_t size_;
  std::vector<int32_t> tokens_;
  std::vector<Digest> keys_;  // of full blocks
  int64_t committed_ = 0;     // blocks that are published, from the first on
  int64_t cached_ = 0;        // and of these, those that others had published
  int64_t asked_ = -1;        // how many were looked for
};

}  // namespace kvblock

#endif  // KVBLOCK_OBJECTS_TABLE_H_
