// The XLA FFI handlers of casts, and of norms that end in one; module.cc hands them to Python for
// registration.
#ifndef KVBLOCK_OPS_CAST_FFI_H_
#define KVBLOCK_OPS_CAST_FFI_H_

#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* KvblockCast(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* KvblockNormCast(XLA_FFI_CallFrame* frame);

#endif  // KVBLOCK_OPS_CAST_FFI_H_
