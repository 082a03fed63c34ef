// The XLA FFI handlers of block_copy; module.cc hands them to Python for registration.
#ifndef KVBLOCK_OPS_BLOCK_COPY_FFI_H_
#define KVBLOCK_OPS_BLOCK_COPY_FFI_H_

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* KvblockCopyCpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* KvblockCopyCuda(XLA_FFI_CallFrame* frame);      // captured in CUDA graphs
XLA_FFI_Error* KvblockCopyCudaRuns(XLA_FFI_CallFrame* frame);  // batch and async: never captured
}

#endif  // KVBLOCK_OPS_BLOCK_COPY_FFI_H_
