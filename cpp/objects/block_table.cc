// Tables of sequences and blocks that are held, as Python sees them.
//
// As in free_list.cc, no Python code runs while the books change.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "objects/free_list.h"
#include "objects/step.h"
#include "objects/table.h"

namespace nb = nanobind;
using kvblock::Books;
using kvblock::Digest;
using kvblock::Hold;
using kvblock::Holder;
using kvblock::KeyOf;
using kvblock::Table;

namespace {

using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Lengths = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename Int>
using Vector = nb::ndarray<nb::numpy, Int, nb::ndim<1>>;
using Numbers = Vector<int32_t>;
using Counts = Vector<int64_t>;
using Matrix = nb::ndarray<nb::numpy, int32_t, nb::ndim<2>>;

template <typename Array, typename Int>
Array ArrayOf(std::vector<Int> values, std::initializer_list<size_t> shape) {
  auto* kept = new std::vector<Int>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<Int>*>(p); });
  return Array(kept->data(), shape, owner);
}

template <typename Int>
Vector<Int> ArrayOf(std::vector<Int> values) {
  const size_t size = values.size();
  return ArrayOf<Vector<Int>>(std::move(values), {size});
}

Numbers IdsOf(const std::vector<int64_t>& blocks) {
  return ArrayOf(std::vector<int32_t>(blocks.begin(), blocks.end()));
}

// ---- blocks that are held ----

Hold* HoldThese(const FreeList& self, Tokens ids) {
  std::vector<int64_t> blocks;
  for (size_t i = 0; i < ids.size(); ++i) {
    const int64_t block = ids(i);
    if (block < 0 || block >= self.books->num_blocks()) {
      throw nb::index_error("FreeList.hold: no such block");
    }
    if (self.books->IsFree(block)) {
      throw nb::value_error("FreeList.hold: a block is free; take it instead");
    }
    blocks.push_back(block);
  }
  auto hold = std::make_unique<Hold>(self.books);
  hold->Add(blocks);
  return hold.release();
}

// A new hold as a Python object, made before the books are read.
std::pair<nb::object, Hold*> NewHold(const FreeList& self) {
  auto hold = std::make_unique<Hold>(self.books);
  Hold* made = hold.get();
  return {nb::cast(hold.release(), nb::rv_policy::take_ownership), made};
}

// Those of the blocks that are published under some keys; and which of the keys these are. If
// `beginning`, up to the first key that finds none.
nb::typed<nb::tuple, Hold, nb::typed<nb::list, int64_t>> HoldKeys(
    const FreeList& self, const std::vector<nb::bytes>& keys, bool beginning) {
  std::vector<Digest> digests;
  digests.reserve(keys.size());
  for (const nb::bytes& key : keys) digests.push_back(DigestOf(key, "key"));
  auto [object, hold] = NewHold(self);
  std::vector<int64_t> places;
  places.reserve(digests.size());
  hold->blocks().reserve(digests.size());
  for (size_t i = 0; i < digests.size(); ++i) {
    const int64_t block = self.books->Match(digests[i]);
    if (block == Books::kNone) {
      if (beginning) break;
      continue;
    }
    self.books->Hold(block, Holder::kTable);
    hold->blocks().push_back(block);
    places.push_back(static_cast<int64_t>(i));
  }
  return nb::make_tuple(object, places);
}

std::optional<Hold*> TakeHold(const FreeList& self, int64_t count) {
  if (count < 0) throw nb::value_error("FreeList.take_hold: count must be at least 0");
  auto hold = std::make_unique<Hold>(self.books);
  if (!hold->Take(count)) return std::nullopt;
  return hold.release();
}

nb::typed<nb::list, nb::typed<nb::tuple, int64_t, nb::bytes>> Victims(const FreeList& self,
                                                                      int64_t count) {
  const std::vector<int64_t> blocks = self.books->Victims(count);
  std::vector<Digest> keys;
  for (const int64_t block : blocks) keys.push_back(self.books->KeyOf(block));
  nb::list victims;
  for (size_t i = 0; i < blocks.size(); ++i)
    victims.append(nb::make_tuple(blocks[i], BytesOf(keys[i])));
  return victims;
}

// ---- keys ----

nb::typed<nb::list, nb::bytes> KeysOf(const Table& self) {
  nb::list keys;
  for (const Digest& key : std::vector<Digest>(self.keys())) keys.append(BytesOf(key));
  return keys;
}

nb::bytes Hash(const nb::bytes& data, const std::optional<nb::bytes>& key) {
  if (!key) return BytesOf(kvblock::Blake3(data.data(), data.size()));
  const Digest with = DigestOf(*key, "key");
  return BytesOf(kvblock::Blake3(data.data(), data.size(), &with));
}

// A list's numbers; nothing where some are no Python ints from `least` to the widest, for who can
// say so in words.
template <typename Int>
std::optional<std::vector<Int>> IntsOf(const nb::typed<nb::list, int64_t>& list, int64_t least) {
  std::vector<Int> numbers(list.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    PyObject* number = PyList_GetItem(list.ptr(), static_cast<Py_ssize_t>(i));
    if (number == nullptr || Py_TYPE(number) != &PyLong_Type) return std::nullopt;
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow != 0 || value < least || value > std::numeric_limits<Int>::max()) {
      return std::nullopt;
    }
    numbers[i] = static_cast<Int>(value);
  }
  return numbers;
}

std::optional<Numbers> TokensOf(const nb::typed<nb::list, int64_t>& list) {
  auto tokens = IntsOf<int32_t>(list, std::numeric_limits<int32_t>::min());
  if (!tokens) return std::nullopt;
  return ArrayOf(std::move(*tokens));
}

std::optional<Counts> CountsOf(const nb::typed<nb::list, int64_t>& list) {
  auto counts = IntsOf<int64_t>(list, 0);
  if (!counts) return std::nullopt;
  return ArrayOf(std::move(*counts));
}

nb::typed<nb::list, nb::bytes> ChainKeys(const nb::bytes& root, const Tokens& tokens,
                                         int64_t block_size) {
  if (block_size < 1) throw nb::value_error("chain_keys: block_size must be at least 1");
  Digest key = DigestOf(root, "root");
  nb::list keys;
  for (int64_t i = 0; (i + 1) * block_size <= static_cast<int64_t>(tokens.size()); ++i) {
    key = KeyOf(key, tokens.data() + i * block_size, block_size);
    keys.append(BytesOf(key));
  }
  return keys;
}

// ---- many tables ----

void CheckCount(const char* where, const std::vector<Table*>& tables, size_t numbers) {
  if (numbers == tables.size() && std::find(tables.begin(), tables.end(), nullptr) == tables.end())
    return;
  throw nb::value_error((std::string(where) + ": pass as many numbers as tables").c_str());
}

std::optional<nb::typed<nb::tuple, Numbers, Matrix, Numbers, Numbers>> Prepare(
    const std::vector<Table*>& tables, const std::optional<Lengths>& starts, const Lengths& counts,
    int64_t width, int64_t spare) {
  if (starts) CheckCount("prepare_step", tables, starts->size());
  CheckCount("prepare_step", tables, counts.size());
  auto step =
      kvblock::PrepareStep(tables, starts ? starts->data() : nullptr, counts.data(), width, spare);
  if (!step) return std::nullopt;
  const std::initializer_list<size_t> shape = {tables.size(), static_cast<size_t>(width)};
  return nb::make_tuple(ArrayOf(std::move(step->slots)),
                        ArrayOf<Matrix>(std::move(step->block_tables), shape),
                        ArrayOf(std::move(step->kv_lens)), ArrayOf(std::move(step->query_start)));
}

}  // namespace

void RegisterBlockTable(nb::module_& m) {
  m.def("blake3", &Hash, nb::arg("data"), nb::arg("key").none() = nb::none(),
        "The BLAKE3 hash, of 32 bytes; with a key of 32 bytes, the keyed hash.");
  m.def("tokens_of", &TokensOf, nb::arg("list"),
        "A list of Python ints as int32; None where one is something else or wider.");
  m.def("counts_of", &CountsOf, nb::arg("list"),
        "A list of Python ints from 0 on as int64; None where one is something else.");
  m.def("chain_keys", &ChainKeys, nb::arg("root"), nb::arg("tokens"), nb::arg("block_size"),
        "The keys of the full blocks of tokens, each made from the one before.");
  nb::class_<Hold>(m, "Hold", "Blocks that are held together, for a copy in flight.")
      .def_prop_ro(
          "ids", [](Hold& self) { return IdsOf(self.blocks()); }, nb::rv_policy::reference)
      .def_prop_ro("released", &Hold::released)
      .def("__len__", [](Hold& self) { return self.released() ? 0 : self.blocks().size(); })
      .def("release", &Hold::Release, "Gives the blocks back; again does nothing.")
      .def("__enter__", [](nb::typed<nb::handle, Hold> self) { return self; })
      .def(
          "__exit__", [](Hold& self, nb::handle, nb::handle, nb::handle) { self.Release(); },
          nb::arg("kind").none(), nb::arg("error").none(), nb::arg("traceback").none());
  m.def("hold", &HoldThese, nb::arg("free_list"), nb::arg("ids"),
        "References to blocks that are held or idle.");
  m.def("hold_keys", &HoldKeys, nb::arg("free_list"), nb::arg("keys"), nb::arg("beginning") = false,
        "References to the blocks that are published under these keys, and the places of those\n"
        "keys in the list. It counts as a use of them. With `beginning`: up to the first key that\n"
        "finds none.");
  m.def("take_hold", &TakeHold, nb::arg("free_list"), nb::arg("count"),
        "Blocks that are free or idle, as one object; None when fewer are there.");
  m.def("victims", &Victims, nb::arg("free_list"), nb::arg("count"),
        "The idle blocks whose places are taken next, as tuples (block, key). Nobody holds them.");
  m.def("prepare_step", &Prepare, nb::arg("tables"), nb::arg("starts").none(), nb::arg("counts"),
        nb::arg("max_blocks"), nb::arg("spare") = 0,
        "Slots, block tables, lengths and where each table's tokens start; None when too few\n"
        "blocks are free.");
  m.def(
      "append_each",
      [](const std::vector<Table*>& tables, const Tokens& tokens, const Lengths& counts) {
        CheckCount("append_each", tables, counts.size());
        const auto total = static_cast<int64_t>(tokens.size());
        const int64_t *first = counts.data(), *end = first + counts.size();
        const bool apart =
            std::any_of(first, end, [&](int64_t count) { return count < 0 || count > total; });
        if (apart || std::accumulate(first, end, int64_t{0}) != total) return false;
        kvblock::AppendEach(tables, tokens.data(), counts.data());
        return true;
      },
      nb::arg("tables"), nb::arg("tokens"), nb::arg("counts"),
      "Tokens at the end of each table; False, and nothing is done, where counts do not add up to\n"
      "the tokens.");
  m.def(
      "commit_each",
      [](const std::vector<Table*>& tables, const std::optional<Lengths>& num_tokens) {
        if (num_tokens) CheckCount("commit_each", tables, num_tokens->size());
        return kvblock::CommitEach(tables, num_tokens ? num_tokens->data() : nullptr);
      },
      nb::arg("tables"), nb::arg("num_tokens").none());
  nb::class_<Table>(m, "BlockTable", "The blocks of one sequence, and the keys of what they hold.")
      .def(
          "__init__",
          [](Table* self, const FreeList& free_list, const nb::bytes& root, int64_t block_size) {
            if (block_size < 1) throw nb::value_error("BlockTable: block_size must be at least 1");
            new (self) Table(free_list.books, DigestOf(root, "root"), block_size);
          },
          nb::arg("free_list"), nb::arg("root"), nb::arg("block_size"))
      .def_prop_ro("block_size", &Table::block_size)
      .def_prop_ro("num_tokens", &Table::num_tokens)
      .def_prop_ro("num_committed", &Table::num_committed)
      .def_prop_ro("num_cached", &Table::num_cached)
      .def_prop_ro("released", &Table::released)
      .def_prop_ro(
          "tokens", [](const Table& self) { return ArrayOf(self.tokens()); },
          nb::rv_policy::reference)
      .def_prop_ro("keys", &KeysOf)
      .def_prop_ro("root", [](const Table& self) { return BytesOf(self.root()); })
      .def_prop_ro(
          "ids", [](const Table& self) { return IdsOf(self.blocks()); }, nb::rv_policy::reference)
      .def("__len__", &Table::size)
      .def(
          "append",
          [](Table& self, const Tokens& tokens) {
            self.Append(tokens.data(), static_cast<int64_t>(tokens.size()));
          },
          nb::arg("tokens"))
      .def("match", &Table::Match, nb::arg("limit"))
      .def("reserve", &Table::Reserve, nb::arg("num_tokens"), nb::arg("spare") = 0)
      .def("commit", &Table::Commit, nb::arg("num_tokens"))
      .def(
          "page_table",
          [](const Table& self, int64_t width) { return ArrayOf(self.PageTable(width)); },
          nb::arg("max_blocks"))
      .def(
          "slots",
          [](const Table& self, int64_t start, int64_t count) {
            return ArrayOf(self.Slots(start, count));
          },
          nb::arg("start"), nb::arg("count"))
      .def("shared", &Table::Shared, nb::arg("start"), nb::arg("count"))
      .def("put", &Table::Put, nb::arg("places"), nb::arg("hold"))
      .def("skip", &Table::Skip, nb::arg("count"))
      .def("shrink", &Table::Shrink, nb::arg("count"))
      .def("free_before", &Table::FreeBefore, nb::arg("token"))
      .def("truncate", &Table::Truncate, nb::arg("num_tokens"))
      .def(
          "fork", [](const Table& self) { return self.Fork().release(); },
          nb::rv_policy::take_ownership)
      .def(
          "hold",
          [](const Table& self, const std::vector<int64_t>& places) {
            return self.HoldSome(places).release();
          },
          nb::arg("places"), nb::rv_policy::take_ownership)
      .def("release", &Table::Release);
}
