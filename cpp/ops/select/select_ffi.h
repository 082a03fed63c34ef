// The XLA FFI handlers that choose tiles; module.cc hands them to Python for registration.
#ifndef KVBLOCK_OPS_SELECT_FFI_H_
#define KVBLOCK_OPS_SELECT_FFI_H_

#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* KvblockPool(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* KvblockKeep(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* KvblockLists(XLA_FFI_CallFrame* frame);

#endif  // KVBLOCK_OPS_SELECT_FFI_H_
