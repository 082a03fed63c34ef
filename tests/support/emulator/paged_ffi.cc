// The FFI handler of paged attention as XLA's CPU calls it: what it launches runs on the emulator.
#include <mutex>

#include "no_stream.h"
//
#include "ops/attention/paged_ffi.cc"

// One after the other, whatever threads XLA calls it from.
extern "C" XLA_FFI_Error* EmulatedPagedAttention(XLA_FFI_CallFrame* frame) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return KvblockPagedAttention(frame);
}
