// The arguments of an update, looked at without JAX's help.
#ifndef KVBLOCK_OBJECTS_TREE_H_
#define KVBLOCK_OBJECTS_TREE_H_

#include <nanobind/nanobind.h>

void RegisterTree(nanobind::module_& m);

#endif  // KVBLOCK_OBJECTS_TREE_H_
