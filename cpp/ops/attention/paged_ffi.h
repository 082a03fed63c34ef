// The XLA FFI handler of paged attention; module.cc hands it to Python for registration.
#ifndef KVBLOCK_OPS_ATTENTION_PAGED_FFI_H_
#define KVBLOCK_OPS_ATTENTION_PAGED_FFI_H_

#include <cstdint>

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* KvblockPagedAttention(XLA_FFI_CallFrame* frame);
}

// As kvblock_paged_attention_workspace.
int64_t PagedAttentionWorkspace(int32_t calls, int32_t sequences, int64_t rows, int32_t num_heads,
                                int32_t num_kv_heads, int32_t value_dim, bool narrow,
                                int32_t split_size, int32_t table_width, int32_t block_size,
                                int32_t head_dim, bool narrow_queries);

#endif  // KVBLOCK_OPS_ATTENTION_PAGED_FFI_H_
