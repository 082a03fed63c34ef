#include "objects/table.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace kvblock {
namespace {

std::string Number(int64_t number) { return std::to_string(number); }

[[noreturn]] void Refuse(const std::string& message) {
  throw std::invalid_argument("BlockTable." + message);
}

}  // namespace

Digest KeyOf(const Digest& parent, const int32_t* tokens, int64_t count) {
  return Blake3(tokens, static_cast<size_t>(count) * sizeof *tokens, &parent);
}

// ---- blocks that are held together ----

std::vector<int64_t>& Hold::blocks() const {
  if (released()) throw std::invalid_argument("Hold: it is released");
  return account_->blocks;
}

bool Hold::Take(int64_t count) {
  std::vector<int64_t>& here = blocks();
  if (count > books_->num_available()) {  // before there is room for them: count may be anything
    ++books_->counters.refused;
    return false;
  }
  const size_t old = here.size();
  here.resize(old + static_cast<size_t>(count), Books::kNone);
  try {
    return books_->Take(count, Holder::kTable, here.data() + old);
  } catch (...) {
    here.resize(old);
    throw;
  }
}

void Hold::Add(const std::vector<int64_t>& blocks) {
  std::vector<int64_t>& here = this->blocks();
  here.reserve(here.size() + blocks.size());
  for (const int64_t block : blocks) {
    books_->Hold(block, Holder::kTable);
    here.push_back(block);
  }
}

// ---- what is refused ----

std::vector<int64_t>& Table::blocks() const {
  if (released()) throw std::invalid_argument("BlockTable: it was freed; open another one");
  return hold_.blocks();
}

void Table::CheckTokens(const char* where, int64_t start, int64_t count) const {
  if (start < 0 || count < 0) {
    Refuse(std::string(where) + ": start and count must be at least 0");
  }
  const int64_t room = size() * size_;
  if (start > room || count > room - start) {
    throw std::out_of_range("BlockTable." + std::string(where) + ": " + Number(count) +
                            " tokens from " + Number(start) + " on do not fit " + Number(size()) +
                            " blocks of " + Number(size_) + " tokens; reserve them first");
  }
}

void Table::CheckPlaces(const char* where, const std::vector<int64_t>& places) const {
  const std::vector<int64_t>& blocks = this->blocks();
  for (const int64_t at : places) {
    if (at < 0 || at >= size() || blocks[static_cast<size_t>(at)] == Books::kNone) {
      throw std::out_of_range("BlockTable." + std::string(where) + ": no block is in this place");
    }
  }
}

// Whether blocks up to `end` that are published already hold what the table says.
void Table::CheckContents(int64_t end) const {
  for (int64_t i = committed_; i < end; ++i) {
    const int64_t own = blocks()[static_cast<size_t>(i)];
    if (own == Books::kNone || !books().IsPublished(own)) continue;
    if (books().KeyOf(own) != keys_[static_cast<size_t>(i)]) {
      Refuse("commit: block [" + Number(i) +
             "] is published and holds other tokens; call writable(start, count) before tokens "
             "are written there");
    }
  }
}

// ---- a sequence that grows ----

void Table::Append(const int32_t* tokens, int64_t count) {
  blocks();
  const int64_t full = (num_tokens() + count) / size_;
  if (static_cast<size_t>(full) > keys_.capacity())
    keys_.reserve(std::max(static_cast<size_t>(full), 2 * keys_.size()));
  tokens_.insert(tokens_.end(), tokens, tokens + count);
  for (auto i = static_cast<int64_t>(keys_.size()); i < full; ++i)
    keys_.push_back(KeyOf(Parent(i), tokens_.data() + i * size_, size_));
}

int64_t Table::Match(int64_t limit) {
  std::vector<int64_t>& blocks = this->blocks();
  if (size() > committed_) {
    Refuse("match: blocks were reserved already; match before you reserve");
  }
  const int64_t end =
      std::min(static_cast<int64_t>(keys_.size()), std::max<int64_t>(limit, 0) / size_);
  blocks.reserve(keys_.size());
  Counters& counters = books().counters;
  if (asked_ < 0) ++counters.lookups;
  counters.queried_blocks += std::max<int64_t>(end - std::max(asked_, committed_), 0);
  asked_ = std::max(asked_, end);
  while (committed_ < end) {
    const int64_t block = books().Match(keys_[static_cast<size_t>(committed_)]);
    if (block == Books::kNone) break;
    books().Hold(block, Holder::kTable);
    blocks.push_back(block);
    ++committed_;
    ++cached_;
    ++counters.hit_blocks;
  }
  return num_committed();
}

bool Table::Reserve(int64_t num_tokens, int64_t spare) {
  const int64_t wanted = BlocksFor(num_tokens) - size();
  if (wanted <= 0) return true;
  if (spare > books().num_available() - wanted) {
    ++books().counters.refused;
    return false;
  }
  return hold_.Take(wanted);
}

void Table::CheckCommit(int64_t num_tokens) const {
  const int64_t room = size() * size_;
  if (num_tokens > this->num_tokens() || num_tokens > room) {
    Refuse("commit: " + Number(num_tokens) + " tokens, but the table has " +
           Number(this->num_tokens()) + " and blocks for " + Number(room) +
           "; append and reserve them first");
  }
  CheckContents(num_tokens / size_);
}

std::vector<int64_t> Table::Commit(int64_t num_tokens) {
  std::vector<int64_t>& blocks = this->blocks();
  CheckCommit(num_tokens);
  const int64_t end = num_tokens / size_;
  std::vector<int64_t> replaced;
  replaced.reserve(static_cast<size_t>(std::max<int64_t>(end - committed_, 0)));
  for (; committed_ < end; ++committed_) {
    int64_t& block = blocks[static_cast<size_t>(committed_)];
    const int64_t own = block;
    if (own == Books::kNone || books().IsPublished(own)) continue;
    const int32_t* first = tokens_.data() + committed_ * size_;
    std::vector<int32_t> tokens;
    if (books().keeps_events) tokens.assign(first, first + size_);
    block = books().Publish(own, keys_[static_cast<size_t>(committed_)], Parent(committed_),
                            std::move(tokens));
    if (block == own) continue;
    books().Hold(block, Holder::kTable);
    books().Drop(own, Holder::kTable);
    replaced.push_back(committed_);
  }
  return replaced;
}

// ---- for programs ----

void Table::CheckWidth(int64_t blocks, int64_t width) const {
  if (width > INT32_MAX) {
    Refuse("page_table: max_blocks must be below 2^31, got " + Number(width));
  }
  if (blocks > width) {
    Refuse("page_table: " + Number(blocks) + " blocks do not fit max_blocks=" + Number(width));
  }
}

void Table::WritePageTable(int64_t width, int32_t* table) const {
  for (const int64_t block : blocks()) *table++ = static_cast<int32_t>(block);
  std::fill(table, table + (width - size()), -1);
}

std::vector<int32_t> Table::PageTable(int64_t width) const {
  CheckWidth(size(), width);
  std::vector<int32_t> table(static_cast<size_t>(width));
  WritePageTable(width, table.data());
  return table;
}

// Those of these tokens that have a block: it is the table's own, and nobody finds it.
void Table::CheckWritable(const char* where, int64_t start, int64_t count) const {
  const auto refuse = [&](int64_t at, const char* why) {
    Refuse(std::string(where) + ": block [" + Number(at) + "] " + why);
  };
  const int64_t end = std::min(BlocksFor(start + count), size());
  for (int64_t at = start / size_; count > 0 && at < end; ++at) {
    const int64_t block = blocks()[static_cast<size_t>(at)];
    if (block == Books::kNone) refuse(at, "was given back by free_before");
    if (books().IsShared(block)) {
      refuse(at, "is shared; call writable(start, count) before tokens are written there");
    }
  }
}

void Table::WriteSlots(int64_t start, int64_t count, int32_t* slots) const {
  int64_t at = start / size_, offset = start % size_;
  for (int64_t i = 0; i < count; ++i) {
    slots[i] = static_cast<int32_t>(blocks()[static_cast<size_t>(at)] * size_ + offset);
    if (++offset < size_) continue;
    offset = 0;
    ++at;
  }
}

std::vector<int32_t> Table::Slots(int64_t start, int64_t count) const {
  CheckTokens("slots", start, count);
  CheckWritable("slots", start, count);
  std::vector<int32_t> slots(static_cast<size_t>(count));
  WriteSlots(start, count, slots.data());
  return slots;
}

// ---- one of many ----

int64_t Table::CheckStep(int64_t start, int64_t count, int64_t width) const {
  if (start < 0 || count < 0 || start > INT32_MAX - count) {
    Refuse("slots: start and count must be at least 0, and fit 32 bits");
  }
  const int64_t wanted = std::max(BlocksFor(start + count), size());
  CheckWidth(wanted, width);
  CheckWritable("slots", start, count);
  return wanted - size();
}

void Table::MakeRoom(int64_t missing) {
  const size_t wanted = blocks().size() + static_cast<size_t>(missing);
  if (wanted > blocks().capacity()) blocks().reserve(std::max(wanted, 2 * blocks().size()));
}

const int64_t* Table::Adopt(const int64_t* fresh, int64_t num_tokens) {
  while (size() < BlocksFor(num_tokens)) blocks().push_back(*fresh++);
  return fresh;
}

// ---- shared ----

std::vector<int64_t> Table::Shared(int64_t start, int64_t count) const {
  CheckTokens("writable", start, count);
  std::vector<int64_t> places;
  if (count == 0) return places;
  for (int64_t at = start / size_; at <= (start + count - 1) / size_; ++at) {
    const int64_t block = blocks()[static_cast<size_t>(at)];
    if (block != Books::kNone && books().IsShared(block)) places.push_back(at);
  }
  return places;
}

void Table::Put(const std::vector<int64_t>& places, Hold& hold) {
  std::vector<int64_t>&blocks = this->blocks(), &fresh = hold.blocks();
  if (hold.books() != hold_.books() || fresh.size() != places.size()) {
    Refuse("put: pass a hold of as many blocks of the same pool");
  }
  CheckPlaces("put", places);
  for (size_t i = 0; i < places.size(); ++i)
    std::swap(blocks[static_cast<size_t>(places[i])], fresh[i]);
  books().counters.copied_on_write += static_cast<int64_t>(places.size());
  hold.Release();
}

std::unique_ptr<Hold> Table::HoldSome(const std::vector<int64_t>& places) const {
  CheckPlaces("hold", places);
  auto hold = std::make_unique<Hold>(hold_.books());
  std::vector<int64_t> chosen;
  for (const int64_t at : places) chosen.push_back(blocks()[static_cast<size_t>(at)]);
  hold->Add(chosen);
  return hold;
}

std::unique_ptr<Table> Table::Fork() const {
  auto other = std::make_unique<Table>(hold_.books(), root_, size_);
  other->tokens_ = tokens_;
  other->keys_ = keys_;
  other->committed_ = committed_;
  other->cached_ = cached_;
  other->asked_ = asked_;
  other->blocks().reserve(blocks().size());
  for (const int64_t block : blocks()) {
    if (block != Books::kNone) books().Hold(block, Holder::kTable);
    other->blocks().push_back(block);
  }
  return other;
}

// ---- given back ----

// The blocks behind so many, the last one first.
void Table::DropBehind(int64_t count) {
  std::vector<int64_t>& blocks = this->blocks();
  while (size() > count) {
    const int64_t block = blocks.back();
    blocks.pop_back();
    if (block != Books::kNone) books().Drop(block, Holder::kTable);
  }
}

void Table::Skip(int64_t count) {
  if (size() > 0 || count < 0 || count > static_cast<int64_t>(keys_.size())) {
    Refuse("skip: an empty table skips as many blocks as have keys");
  }
  blocks().resize(static_cast<size_t>(count), Books::kNone);
  committed_ = cached_ = count;
}

void Table::Shrink(int64_t count) { DropBehind(std::max(count, committed_)); }

void Table::FreeBefore(int64_t token) {
  const int64_t end = std::min(token / size_, size());
  for (int64_t i = end; i-- > 0;) {
    int64_t& block = blocks()[static_cast<size_t>(i)];
    if (block == Books::kNone) break;  // so are those before it
    const int64_t given = std::exchange(block, Books::kNone);
    books().Drop(given, Holder::kTable);
  }
}

void Table::Truncate(int64_t num_tokens) {
  if (num_tokens < 0 || num_tokens > this->num_tokens()) {
    Refuse("truncate: the table has " + Number(this->num_tokens()) +
           " tokens, got num_tokens=" + Number(num_tokens));
  }
  DropBehind(BlocksFor(num_tokens));
  const int64_t full = num_tokens / size_;
  tokens_.resize(static_cast<size_t>(num_tokens));
  keys_.resize(static_cast<size_t>(full));
  committed_ = std::min(committed_, full);
  cached_ = std::min(cached_, full);
  asked_ = std::min(asked_, full);
}

}  // namespace kvblock
