// The books of a pool: which blocks are free, and who holds the others.
//
// They are kept here and not in Python because Python can stop anywhere: a signal or another thread
// may come between two bytecodes, and an exception inside a finalizer is dropped. In this file no
// Python code runs while the books change, so every change happens as a whole under the GIL, and a
// lease gives its block back however it ends. Python objects are made before the books are read:
// making one may run the garbage collector, and with it finalizers that change them.
#include "objects/free_list.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace {

// What of the pool an export shows: a block, and the indices of a part of it (layer, outer).
struct Exported {
  int64_t block;
  std::vector<int64_t> part;
};

// Shared by a free list and its leases, which may outlive it.
struct Books {
  explicit Books(int64_t blocks) : handles(blocks, 0), exports(blocks, 0) {
    free.reserve(blocks);  // so that giving a block back never allocates
    for (int64_t i = blocks; i-- > 0;) free.push_back(i);
  }
  int64_t References(int64_t block) const { return handles[block] + exports[block]; }
  void Drop(std::vector<int64_t>& counts, int64_t block) {
    --counts[block];
    if (References(block) == 0) free.push_back(block);
  }

  std::vector<int64_t> free;              // the last one is taken first
  std::vector<int64_t> handles, exports;  // for each block
  std::map<uint64_t, Exported> live;      // the exports, oldest first
  uint64_t next_export = 0;
};

// The reference that a DLPack export holds.
class ExportLease {
 public:
  ExportLease() = default;
  ExportLease(const ExportLease&) = delete;
  ExportLease& operator=(const ExportLease&) = delete;
  ~ExportLease() {
    if (books_ == nullptr) return;
    auto it = books_->live.find(key_);
    books_->Drop(books_->exports, it->second.block);
    books_->live.erase(it);
  }
  void Hold(std::shared_ptr<Books> books, Exported what) {
    key_ = books->next_export++;
    const int64_t block = what.block;
    books->live.emplace(key_, std::move(what));
    ++books->exports[block];
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

  void Hold(std::shared_ptr<Books> books, int64_t block) {
    ++books->handles[block];
    block_ = block;
    books_ = std::move(books);
  }
  void Release() {
    if (books_ == nullptr) return;
    books_->Drop(books_->handles, block_);
    books_.reset();
  }
  bool released() const { return books_ == nullptr; }
  int64_t block() const { return block_; }
  bool IsIn(const std::shared_ptr<Books>& books) const { return books_ == books; }

  std::optional<nb::typed<nb::object, Lease>> Share() const {
    nb::object other = Make<Lease>();
    if (released()) return std::nullopt;
    nb::inst_ptr<Lease>(other)->Hold(books_, block_);
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
  int64_t block_ = -1;
};

class FreeList {
 public:
  explicit FreeList(int64_t num_blocks) {
    if (num_blocks < 0) throw nb::value_error("FreeList: num_blocks must be at least 0");
    books_ = std::make_shared<Books>(num_blocks);
  }
  size_t size() const { return books_->free.size(); }

  std::optional<nb::typed<nb::list, Lease>> Take(size_t count) const {
    if (count > size()) return std::nullopt;  // before the objects are made: count may be anything
    nb::list leases;
    std::vector<Lease*> empty;
    for (size_t i = 0; i < count; ++i) {
      nb::object lease = Make<Lease>();
      empty.push_back(nb::inst_ptr<Lease>(lease));
      leases.append(std::move(lease));
    }
    if (count > size()) return std::nullopt;
    for (Lease* lease : empty) {
      const int64_t block = books_->free.back();
      books_->free.pop_back();
      lease->Hold(books_, block);
    }
    return nb::typed<nb::list, Lease>(std::move(leases));
  }

  int64_t Release(const std::vector<Lease*>& leases, bool skip_released) const {
    for (const Lease* lease : leases) {
      if (lease == nullptr) throw nb::type_error("FreeList: leases must not be None");
    }
    std::unordered_set<const Lease*> seen;
    for (size_t i = 0; i < leases.size() && !skip_released; ++i) {
      const bool held = leases[i]->IsIn(books_) && seen.insert(leases[i]).second;
      if (!held) return static_cast<int64_t>(i);
    }
    for (Lease* lease : leases) lease->Release();
    return -1;
  }

  int64_t References(size_t block) const {
    if (block >= books_->handles.size()) throw nb::index_error("FreeList: no such block");
    return books_->References(static_cast<int64_t>(block));
  }
  size_t NumExports() const { return books_->live.size(); }

  std::vector<std::pair<int64_t, std::vector<int64_t>>> Exports(bool freed_alone) const {
    std::vector<std::pair<int64_t, std::vector<int64_t>>> found;
    for (const auto& [key, what] : books_->live) {
      if (!freed_alone || books_->handles[what.block] == 0)
        found.push_back({what.block, what.part});
    }
    return found;
  }

 private:
  std::shared_ptr<Books> books_;
};

}  // namespace

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
      .def(nb::init<int64_t>(), nb::arg("num_blocks"))
      .def("__len__", &FreeList::size, "How many blocks are free.")
      .def("take", &FreeList::Take, nb::arg("count"),
           "References to `count` free blocks; None when fewer are free, and none is taken.")
      .def("release", &FreeList::Release, nb::arg("leases"), nb::arg("skip_released") = false,
           "Gives references back, all or none: returns -1, or the index of the first that is\n"
           "released already or that came before.")
      .def("references", &FreeList::References, nb::arg("block"),
           "How many handles and exports hold the block.")
      .def_prop_ro("num_exports", &FreeList::NumExports)
      .def("exports", &FreeList::Exports, nb::arg("freed_alone") = false,
           "The live exports as (block, part); or only those that alone hold their block.");
}
