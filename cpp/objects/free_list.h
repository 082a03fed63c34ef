// Books as Python sees them: free lists, references to blocks, and tables of sequences.
#ifndef KVBLOCK_OBJECTS_FREE_LIST_H_
#define KVBLOCK_OBJECTS_FREE_LIST_H_

#include <nanobind/nanobind.h>

#include <memory>

#include "objects/books.h"

// What Python calls the books of a pool. Tables, handles and exports share them and may outlive it.
struct FreeList {
  std::shared_ptr<kvblock::Books> books;
};

// 32 bytes; what: names the argument in an error.
kvblock::Digest DigestOf(const nanobind::bytes& bytes, const char* what);
nanobind::bytes BytesOf(const kvblock::Digest& digest);

void RegisterFreeList(nanobind::module_& m);
void RegisterBlockTable(nanobind::module_& m);

#endif  // KVBLOCK_OBJECTS_FREE_LIST_H_
