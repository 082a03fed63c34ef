// Counted references to a pool's blocks: who holds which, and what is free.
#ifndef KVBLOCK_OBJECTS_FREE_LIST_H_
#define KVBLOCK_OBJECTS_FREE_LIST_H_

#include <nanobind/nanobind.h>

void RegisterFreeList(nanobind::module_& m);

#endif  // KVBLOCK_OBJECTS_FREE_LIST_H_
