// The XLA FFI handler of casts; module.cc hands it to Python for registration.
#ifndef KVBLOCK_OPS_CAST_FFI_H_
#define KVBLOCK_OPS_CAST_FFI_H_

#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* KvblockCast(XLA_FFI_CallFrame* frame);

#endif  // KVBLOCK_OPS_CAST_FFI_H_
