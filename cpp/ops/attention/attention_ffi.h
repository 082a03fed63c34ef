// The XLA FFI handlers of attention; module.cc hands them to Python for registration.
#ifndef KVBLOCK_OPS_ATTENTION_FFI_H_
#define KVBLOCK_OPS_ATTENTION_FFI_H_

#include <cstdint>

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* KvblockAttentionForward(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* KvblockAttentionBackwardKv(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* KvblockAttentionBackwardQ(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* KvblockAttentionBackwardBias(XLA_FFI_CallFrame* frame);
}

// As kvblock_attention_workspace. `present` tells of the optional operands, as the attribute does.
int64_t AttentionWorkspace(int32_t kernels, int32_t dtype, int64_t batch, int64_t q_len,
                           int64_t kv_len, int32_t num_heads, int32_t num_kv_heads,
                           int32_t head_dim, int32_t value_dim, int64_t present, bool backward);

#endif  // KVBLOCK_OPS_ATTENTION_FFI_H_
