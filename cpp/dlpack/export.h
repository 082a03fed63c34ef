// Offset views of an exported buffer, as DLPack capsules of their own.
#ifndef KVBLOCK_DLPACK_EXPORT_H_
#define KVBLOCK_DLPACK_EXPORT_H_

#include <nanobind/nanobind.h>

void RegisterDLPack(nanobind::module_& m);

#endif  // KVBLOCK_DLPACK_EXPORT_H_
