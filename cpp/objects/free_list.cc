// Free lists, and single references to blocks: leases and those of exports.
//
// Books are kept in C++ and not in Python because Python can stop anywhere: a signal or another
// thread may come between two bytecodes, and an exception inside a finalizer is dropped. In this
// file no Python code runs while the books change, so every change happens as a whole under the
// GIL, and a lease gives its block back however it ends. Python objects are made before the books
// are read: making one may run the garbage collector, and with it finalizers that change them.
#include "objects/free_list.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace nb = nanobind;
using kvblock::Books;
using kvblock::Exported;
using kvblock::Holder;
using kvblock::One;

namespace {

// The reference that a DLPack export holds.
class ExportLease {
 public:
  ExportLease() = default;
  ExportLease(const ExportLease&) = delete;
  ExportLease& operator=(const ExportLease&) = delete;
  ~ExportLease() {
    if (books_ == nullptr) return;
    auto it = books_->live.find(key_);
    books_->Drop(it->second.block, Holder::kExport);
    books_->live.erase(it);
  }
  void Hold(std::shared_ptr<Books> books, Exported what) {
    key_ = books->next_export++;
    const int64_t block = what.block;
    books->live.emplace(key_, std::move(what));
    books->Hold(block, Holder::kExport);
    books_ = std::move(books);
  }

 private:
  std::shared_ptr<Books> books_;
  uint64_t key_ = 0;
};

// A new Python object that holds a T.
template <typename T>
nb::object Make() {
  nb::object self = nb::inst_alloc(nb::type<T>());
  new (nb::inst_ptr<T>(self)) T();
  nb::inst_mark_ready(self);
  return self;
}

// One counted reference to a block, given back when it is released or collected.
class Lease {
 public:
  Lease() = default;
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() { Release(); }

  // A block that this has a reference to by now.
  void Own(std::shared_ptr<Books> books, int64_t block) {
    block_ = block;
    books_ = std::move(books);
    account_.emplace(*books_, block);
  }
  void Release() {
    account_.reset();
    books_.reset();
  }
  bool released() const { return books_ == nullptr; }
  int64_t block() const { return block_; }
  bool IsIn(const std::shared_ptr<Books>& books) const { return books_ == books; }

  std::optional<nb::typed<nb::object, Lease>> Share() const {
    nb::object other = Make<Lease>();
    if (released()) return std::nullopt;
    books_->Hold(block_, Holder::kHandle);
    nb::inst_ptr<Lease>(other)->Own(books_, block_);
    return nb::typed<nb::object, Lease>(std::move(other));
  }
  std::optional<nb::typed<nb::object, ExportLease>> Export(std::vector<int64_t> part) const {
    nb::object lease = Make<ExportLease>();
    if (released()) return std::nullopt;
    nb::inst_ptr<ExportLease>(lease)->Hold(books_, {block_, std::move(part)});
    return nb::typed<nb::object, ExportLease>(std::move(lease));
  }

 private:
  std::shared_ptr<Books> books_;
  std::optional<One> account_;
  int64_t block_ = -1;
};

std::optional<nb::typed<nb::list, Lease>> Take(const FreeList& self, size_t count) {
  const auto available = [&] { return static_cast<size_t>(self.books->num_available()); };
  if (count > available()) {  // before the objects are made: count may be anything
    ++self.books->counters.refused;
    return std::nullopt;
  }
  nb::list leases;
  std::vector<Lease*> empty;
  for (size_t i = 0; i < count; ++i) {
    nb::object lease = Make<Lease>();
    empty.push_back(nb::inst_ptr<Lease>(lease));
    leases.append(std::move(lease));
  }
  std::vector<int64_t> blocks(count);
  if (!self.books->Take(static_cast<int64_t>(count), Holder::kHandle, blocks.data()))
    return std::nullopt;
  for (size_t i = 0; i < count; ++i) empty[i]->Own(self.books, blocks[i]);
  return nb::typed<nb::list, Lease>(std::move(leases));
}

int64_t Release(const FreeList& self, const std::vector<Lease*>& leases, bool skip_released) {
  for (const Lease* lease : leases) {
    if (lease == nullptr) throw nb::type_error("FreeList: leases must not be None");
  }
  std::unordered_set<const Lease*> seen;
  for (size_t i = 0; i < leases.size() && !skip_released; ++i) {
    const bool held = leases[i]->IsIn(self.books) && seen.insert(leases[i]).second;
    if (!held) return static_cast<int64_t>(i);
  }
  for (Lease* lease : leases) lease->Release();
  return -1;
}

std::vector<std::pair<int64_t, std::vector<int64_t>>> Exports(const FreeList& self,
                                                              bool freed_alone) {
  std::vector<std::pair<int64_t, std::vector<int64_t>>> found;
  for (const auto& [key, what] : self.books->live) {
    if (!freed_alone ||
        self.books->References(what.block) == self.books->References(what.block, Holder::kExport))
      found.push_back({what.block, what.part});
  }
  return found;
}

// A block's number, checked.
int64_t Known(const FreeList& self, int64_t block) {
  if (block < 0 || block >= self.books->num_blocks()) {
    throw nb::index_error("FreeList: no such block");
  }
  return block;
}

void CheckUnpublished(const FreeList& self, int64_t block) {
  if (self.books->References(Known(self, block)) == 0) {
    throw nb::value_error("FreeList: a block is published by who holds it, and nobody does");
  }
  if (self.books->IsPublished(block)) {
    throw nb::value_error("FreeList: the block is published already");
  }
}

int64_t Publish(const FreeList& self, int64_t block, const nb::bytes& key,
                const nb::bytes& parent) {
  const kvblock::Digest named = DigestOf(key, "key"), before = DigestOf(parent, "parent");
  CheckUnpublished(self, block);
  return self.books->Publish(block, named, before, {});
}

std::vector<kvblock::Digest> DigestsOf(const std::vector<nb::bytes>& keys, const char* name) {
  std::vector<kvblock::Digest> digests;
  digests.reserve(keys.size());
  for (const nb::bytes& key : keys) digests.push_back(DigestOf(key, name));
  return digests;
}

int64_t PublishEach(const FreeList& self, const std::vector<int64_t>& blocks,
                    const std::vector<nb::bytes>& keys, const std::vector<nb::bytes>& parents) {
  if (keys.size() != blocks.size() || parents.size() != blocks.size()) {
    throw nb::value_error("FreeList: each block has a key and a parent");
  }
  const auto named = DigestsOf(keys, "key"), before = DigestsOf(parents, "parent");
  int64_t others = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    CheckUnpublished(self, blocks[i]);
    others += self.books->Publish(blocks[i], named[i], before[i], {}) != blocks[i];
  }
  return others;
}

std::vector<bool> ArePublished(const FreeList& self, const std::vector<nb::bytes>& keys) {
  const auto digests = DigestsOf(keys, "key");
  std::vector<bool> found;
  found.reserve(keys.size());
  for (const kvblock::Digest& key : digests) found.push_back(self.books->Find(key) != Books::kNone);
  return found;
}

int64_t Forget(const FreeList& self, const std::vector<nb::bytes>& keys) {
  int64_t found = 0;
  for (const kvblock::Digest& key : DigestsOf(keys, "key")) {
    const int64_t block = self.books->Find(key);
    if (block == Books::kNone) continue;
    self.books->Forget(block);
    ++found;
  }
  return found;
}

void SetPolicy(const FreeList& self, const std::string& name) {
  if (name != "lru" && name != "lfu") {
    throw nb::value_error("FreeList: policy must be 'lru' or 'lfu'");
  }
  self.books->set_policy(name == "lru" ? kvblock::Policy::kLru : kvblock::Policy::kLfu);
}

nb::typed<nb::list, nb::typed<nb::tuple, nb::str, nb::bytes, nb::bytes,
                              nb::typed<nb::list, int64_t>, int64_t>>
DrainEvents(const FreeList& self) {
  static const char* const kNames[] = {"stored", "removed"};
  std::vector<kvblock::Event> events;
  events.swap(self.books->events);
  nb::list drained;
  for (const kvblock::Event& event : events) {
    nb::list tokens;
    for (const int32_t token : event.tokens) tokens.append(token);
    drained.append(nb::make_tuple(kNames[event.kind], BytesOf(event.key), BytesOf(event.parent),
                                  tokens, event.block));
  }
  return drained;
}

nb::typed<nb::dict, nb::str, int64_t> CountersOf(const FreeList& self) {
  const kvblock::Counters& c = self.books->counters;
  nb::dict counters;
  counters["lookups"] = c.lookups;
  counters["queried_blocks"] = c.queried_blocks;
  counters["hit_blocks"] = c.hit_blocks;
  counters["allocated"] = c.allocated;
  counters["published"] = c.published;
  counters["evicted"] = c.evicted;
  counters["duplicates"] = c.duplicates;
  counters["copied_on_write"] = c.copied_on_write;
  counters["refused"] = c.refused;
  return counters;
}

}  // namespace

kvblock::Digest DigestOf(const nb::bytes& bytes, const char* what) {
  kvblock::Digest digest;
  if (bytes.size() != digest.size()) {
    throw nb::value_error(
        (std::string(what) + " must be of 32 bytes, got " + std::to_string(bytes.size())).c_str());
  }
  std::memcpy(digest.data(), bytes.data(), digest.size());
  return digest;
}

nb::bytes BytesOf(const kvblock::Digest& digest) { return nb::bytes(digest.data(), digest.size()); }

void RegisterFreeList(nb::module_& m) {
  // The process may end while blocks and tensors are alive, which is nothing to warn of.
  nb::set_leak_warnings(false);
  nb::class_<ExportLease>(m, "ExportLease",
                          "The reference that a DLPack export holds; gone when it is collected.");
  nb::class_<Lease>(m, "Lease",
                    "One counted reference to a block, given back when it is released, collected,\n"
                    "or at the end of a with.")
      .def_prop_ro("block_id", &Lease::block, "The block, also after the release.")
      .def_prop_ro("released", &Lease::released)
      .def("share", &Lease::Share, "Another reference to the block; None when this is released.")
      .def("export", &Lease::Export, nb::arg("part"),
           "A reference for an export of part of the block; None when this is released.")
      .def("__enter__", [](nb::typed<nb::handle, Lease> self) { return self; })
      .def(
          "__exit__", [](Lease& self, nb::handle, nb::handle, nb::handle) { self.Release(); },
          nb::arg("kind").none(), nb::arg("error").none(), nb::arg("traceback").none());
  nb::class_<FreeList>(m, "FreeList", "Which blocks are free, and who holds each of the others.")
      .def(
          "__init__",
          [](FreeList* self, int64_t num_blocks) {
            if (num_blocks < 0) throw nb::value_error("FreeList: num_blocks must be at least 0");
            new (self) FreeList{std::make_shared<Books>(num_blocks)};
          },
          nb::arg("num_blocks"))
      .def(
          "__len__", [](const FreeList& self) { return self.books->num_available(); },
          "How many blocks can be taken: those that are free, and those that are idle.")
      .def_prop_ro("num_blocks", [](const FreeList& self) { return self.books->num_blocks(); })
      .def_prop_ro("num_free", [](const FreeList& self) { return self.books->num_free(); })
      .def_prop_ro(
          "num_idle", [](const FreeList& self) { return self.books->num_idle(); },
          "How many are found by their keys and held by nobody.")
      .def("take", &Take, nb::arg("count"),
           "References to `count` blocks; None when fewer are there, and none is taken.")
      .def("release", &Release, nb::arg("leases"), nb::arg("skip_released") = false,
           "Gives references back, all or none: returns -1, or the index of the first that is\n"
           "released already or that came before.")
      .def(
          "references",
          [](const FreeList& self, int64_t block) {
            return self.books->References(Known(self, block));
          },
          nb::arg("block"), "How many handles, tables and exports hold the block.")
      .def_prop_ro("num_exports", [](const FreeList& self) { return self.books->live.size(); })
      .def("exports", &Exports, nb::arg("freed_alone") = false,
           "The live exports as (block, part); or only those that alone hold their block.")
      .def(
          "find",
          [](const FreeList& self, const nb::bytes& key) -> std::optional<int64_t> {
            const int64_t block = self.books->Find(DigestOf(key, "key"));
            if (block == Books::kNone) return std::nullopt;
            return block;
          },
          nb::arg("key"), "The block that is published under a key.")
      .def(
          "is_published",
          [](const FreeList& self, int64_t block) {
            return self.books->IsPublished(Known(self, block));
          },
          nb::arg("block"))
      .def("publish", &Publish, nb::arg("block"), nb::arg("key"), nb::arg("parent"),
           "Has a block that somebody holds found by its key; returns it, or the block that has\n"
           "the key already.")
      .def(
          "publish_each", &PublishEach, nb::arg("blocks"), nb::arg("keys"), nb::arg("parents"),
          "`publish` of many, in order, up to the first that cannot be. Returns under how many of\n"
          "the keys another block stays found.")
      .def("are_published", &ArePublished, nb::arg("keys"),
           "Of each key, whether a block is published under it.")
      .def("forget", &Forget, nb::arg("keys"),
           "Has these keys found no more; idle blocks become free. Returns how many there were.")
      .def("forget_idle", [](const FreeList& self) { self.books->ForgetIdle(); })
      .def("set_policy", &SetPolicy, nb::arg("policy"),
           "Whose place is taken first: 'lru' or 'lfu'.")
      .def(
          "keep_events",
          [](const FreeList& self, bool keep) {
            self.books->keeps_events = keep;
            if (!keep) self.books->events.clear();
          },
          nb::arg("keep"))
      .def(
          "drain_events", &DrainEvents,
          "What was stored and removed since the last call, as tuples (kind, key, parent, tokens,\n"
          "block); kind: 'stored' or 'removed'.")
      .def("counters", &CountersOf, "What has happened so far, counted.")
      .def(
          "check", [](const FreeList& self) { return self.books->Check(); },
          "What is wrong with these books, in words; nothing if they are right.");
}
