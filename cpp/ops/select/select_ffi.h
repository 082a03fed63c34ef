// The XLA FFI handlers that choose tiles; module.cc hands them to Python for registration.
#ifndef KVBLOCK_OPS_SELECT_FFI_H_
#define KVBLOCK_OPS_SELECT_FFI_H_

#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* KvblockPoolPieces(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* KvblockWeighTiles(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* KvblockKeepTiles(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* KvblockListTiles(XLA_FFI_CallFrame* frame);

#endif  // KVBLOCK_OPS_SELECT_FFI_H_
