// The XLA FFI handlers of kernel_call; module.cc hands them to Python for registration.
#ifndef KVBLOCK_OPS_KERNEL_CALL_FFI_H_
#define KVBLOCK_OPS_KERNEL_CALL_FFI_H_

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* KvblockKernelInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* KvblockKernelPrepare(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* KvblockKernelExecute(XLA_FFI_CallFrame* frame);
// Waits for the kernel and names it where it fails; never captured.
XLA_FFI_Error* KvblockKernelExecuteAndWait(XLA_FFI_CallFrame* frame);
}

namespace kvblock {
// What XLA keeps of a call between the stages, as it wants to know of it.
XLA_FFI_TypeId* KernelStateId();
const XLA_FFI_TypeInfo* KernelStateInfo();
}  // namespace kvblock

#endif  // KVBLOCK_OPS_KERNEL_CALL_FFI_H_
