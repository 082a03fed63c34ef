#include "objects/books.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace kvblock {

Account::Account(Books& books) : books_(books), before_(nullptr), behind_(books.accounts_) {
  if (behind_ != nullptr) behind_->before_ = this;
  books.accounts_ = this;
}

Account::~Account() {
  (before_ != nullptr ? before_->behind_ : books_.accounts_) = behind_;
  if (behind_ != nullptr) behind_->before_ = before_;
}

// From the end: what follows something is found through it, and has to go first.
Several::~Several() {
  for (size_t i = blocks.size(); i-- > 0;)
    if (blocks[i] != Books::kNone) books_.Drop(blocks[i], Holder::kTable);
}

void Several::CountIn(std::vector<int64_t>& counts) const {
  for (const int64_t block : blocks)
    if (block != Books::kNone) ++counts[block];
}

One::~One() { books_.Drop(block_, Holder::kHandle); }

Books::Books(int64_t blocks)
    : references_(blocks, 0),
      published_(blocks, 0),
      keys_(blocks),
      index_(keys_),
      before_(blocks + kClasses),
      behind_(blocks + kClasses),
      uses_(blocks, 0),
      age_(blocks, 0) {
  for (auto& counts : counts_) counts.assign(blocks, 0);
  free_.reserve(blocks);  // so that giving a block back never allocates
  for (int64_t i = blocks; i-- > 0;) free_.push_back(i);
  for (int64_t end = blocks; end < blocks + kClasses; ++end) before_[end] = behind_[end] = end;
}

// ---- idle blocks ----

void Books::Age(int64_t block) {
  uses_[block] >>= std::min<uint32_t>(present_age_ - age_[block], 31);
  age_[block] = present_age_;
}

int Books::ClassOf(int64_t block) const {
  if (policy_ == Policy::kLru) return 0;
  int power = 0;
  for (uint32_t uses = uses_[block]; uses > 1 && power < kClasses - 1; uses /= 2) ++power;
  return power;
}

void Books::Shelve(int64_t block) {
  Age(block);
  const int64_t end = num_blocks() + ClassOf(block), last = before_[end];
  before_[block] = last;
  behind_[block] = end;
  behind_[last] = before_[end] = block;
  ++num_idle_;
}

void Books::Unshelve(int64_t block) {
  behind_[before_[block]] = behind_[block];
  before_[behind_[block]] = before_[block];
  --num_idle_;
}

int64_t Books::NextVictim() const {
  for (int64_t end = num_blocks(); end < num_blocks() + kClasses; ++end)
    if (behind_[end] != end) return behind_[end];
  return kNone;
}

void Books::Evict() {
  const int64_t block = NextVictim();
  Forget(block);
  ++counters.evicted;
  if (policy_ == Policy::kLru || ++evictions_ < num_blocks()) return;
  evictions_ = 0;
  ++present_age_;
  for (int64_t end = num_blocks() + 1; end < num_blocks() + kClasses; ++end) Join(end, end - 1);
}

// The blocks of one list behind those of another.
void Books::Join(int64_t end, int64_t to) {
  const int64_t first = behind_[end], last = before_[end], join = before_[to];
  if (first == end) return;
  behind_[join] = first;
  before_[first] = join;
  behind_[last] = to;
  before_[to] = last;
  before_[end] = behind_[end] = end;
}

void Books::set_policy(Policy policy) {
  policy_ = policy;
  for (int64_t end = num_blocks() + 1; end < num_blocks() + kClasses; ++end)
    Join(end, num_blocks());
}

std::vector<int64_t> Books::Victims(int64_t count) const {
  std::vector<int64_t> found;
  for (int64_t end = num_blocks(); end < num_blocks() + kClasses; ++end) {
    for (int64_t block = behind_[end]; block != end; block = behind_[block]) {
      if (static_cast<int64_t>(found.size()) >= count) return found;
      found.push_back(block);
    }
  }
  return found;
}

// ---- references ----

bool Books::Take(int64_t count, Holder holder, int64_t* blocks) {
  if (count > num_available()) {
    ++counters.refused;
    return false;
  }
  ReserveEvents(count - num_free());
  for (int64_t i = 0; i < count; ++i) {
    if (free_.empty()) Evict();
    blocks[i] = free_.back();
    free_.pop_back();
    ++references_[blocks[i]];
    ++counts_[static_cast<int>(holder)][blocks[i]];
  }
  counters.allocated += count;
  return true;
}

void Books::Hold(int64_t block, Holder holder) {
  if (IsIdle(block)) Unshelve(block);
  ++references_[block];
  ++counts_[static_cast<int>(holder)][block];
}

void Books::Drop(int64_t block, Holder holder) {
  --counts_[static_cast<int>(holder)][block];
  if (--references_[block] > 0) return;
  if (IsPublished(block)) {
    Shelve(block);
  } else {
    free_.push_back(block);
  }
}

// ---- keys ----

void Books::ReserveEvents(int64_t count) {
  if (!keeps_events || count <= 0) return;
  const size_t wanted = events.size() + static_cast<size_t>(count);
  if (wanted > events.capacity()) events.reserve(std::max(wanted, 2 * events.size()));
}

int64_t Books::Match(const Digest& key) {
  const int64_t block = index_.Find(key);
  if (block == kNone) return block;
  const bool idle = IsIdle(block);
  if (idle) Unshelve(block);
  Age(block);
  if (uses_[block] < UINT32_MAX) ++uses_[block];
  if (idle) Shelve(block);
  return block;
}

int64_t Books::Publish(int64_t block, const Digest& key, const Digest& parent,
                       std::vector<int32_t> tokens) {
  const int64_t there = index_.Find(key);
  if (there != kNone) {
    if (there != block) ++counters.duplicates;
    return there;
  }
  if (keeps_events) events.push_back({Event::kStored, key, parent, std::move(tokens), block});
  keys_[block] = key;
  published_[block] = 1;
  index_.Insert(block);
  uses_[block] = 1;
  age_[block] = present_age_;
  ++counters.published;
  return block;
}

void Books::Forget(int64_t block) {
  if (keeps_events) events.push_back({Event::kRemoved, keys_[block], {}, {}, block});
  index_.Erase(block);
  if (references_[block] == 0) {
    Unshelve(block);
    free_.push_back(block);
  }
  published_[block] = 0;
}

void Books::ForgetIdle() {
  ReserveEvents(num_idle_);
  for (int64_t block = NextVictim(); block != kNone; block = NextVictim()) Forget(block);
}

// ---- checked ----

std::vector<std::string> Books::Check() const {
  std::vector<std::string> wrong;
  const auto say = [&](int64_t block, const std::string& what) {
    wrong.push_back("block " + std::to_string(block) + " " + what);
  };
  const int64_t blocks = num_blocks();
  std::vector<int64_t> free(blocks, 0), idle(blocks, 0);
  std::array<std::vector<int64_t>, kHolders> counts;
  for (auto& of_holder : counts) of_holder.assign(blocks, 0);
  for (const int64_t block : free_) ++free[block];
  int64_t listed = 0;
  for (int64_t end = blocks; end < blocks + kClasses; ++end) {
    for (int64_t block = behind_[end]; block != end && listed <= blocks;
         block = behind_[block], ++listed) {
      ++idle[block];
      if (before_[behind_[block]] != block) say(block, "is not in front of who is behind it");
    }
  }
  const auto counted = [&](Holder holder) -> std::vector<int64_t>& {
    return counts[static_cast<int>(holder)];
  };
  for (const auto& [number, exported] : live) ++counted(Holder::kExport)[exported.block];
  for (const Account* account = accounts_; account != nullptr; account = account->behind_)
    account->CountIn(counted(account->holder()));
  static const char* const kNames[kHolders] = {"handles", "exports", "tables"};
  for (int64_t block = 0; block < blocks; ++block) {
    int64_t references = 0;
    for (int holder = 0; holder < kHolders; ++holder) {
      const int64_t there = counts[holder][block], noted = counts_[holder][block];
      references += there;
      if (there != noted)
        say(block, "has " + std::to_string(there) + " " + kNames[holder] + ", and " +
                       std::to_string(noted) + " are noted");
    }
    if (references_[block] != references) say(block, "has a wrong number of references");
    if (free[block] != (IsFree(block) ? 1 : 0))
      say(block, "is " + std::to_string(free[block]) + " times among the free ones");
    if (idle[block] != (IsIdle(block) ? 1 : 0))
      say(block, "is " + std::to_string(idle[block]) + " times among the idle ones");
    if (IsPublished(block) && index_.Find(keys_[block]) != block)
      say(block, "is not found by its key");
  }
  if (listed != num_idle_) wrong.push_back("the number of idle blocks is wrong");
  if (index_.size() != std::accumulate(published_.begin(), published_.end(), int64_t{0}))
    wrong.push_back("keys are left of blocks that are not published");
  return wrong;
}

}  // namespace kvblock
