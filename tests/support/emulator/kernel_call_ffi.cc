// The handlers of kernel_call as XLA's CPU calls them.
#include "no_stream.h"
//
#include "ops/kernel_call/kernel_call_ffi.cc"

extern "C" void* emulator_kernel_state_id() { return kvblock::KernelStateId(); }
extern "C" const void* emulator_kernel_state_info() { return kvblock::KernelStateInfo(); }
