// The XLA FFI handlers of attention; module.cc hands them to Python for registration.
#ifndef KVBLOCK_OPS_ATTENTION_FFI_H_
#define KVBLOCK_OPS_ATTENTION_FFI_H_

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* KvblockAttentionForward(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* KvblockAttentionForwardSplit(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* KvblockAttentionBackwardKv(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* KvblockAttentionBackwardQ(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* KvblockAttentionBackwardBias(XLA_FFI_CallFrame* frame);
}

#endif  // KVBLOCK_OPS_ATTENTION_FFI_H_
