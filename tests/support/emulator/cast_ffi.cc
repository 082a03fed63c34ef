// The FFI handler of casts as XLA's CPU calls it: what it launches runs on the emulator.
#include <mutex>

#include "no_stream.h"
//
#include "ops/cast/cast_ffi.cc"

// One after the other, whatever threads XLA calls them from; norm_cast_ffi.cc's, too.
std::mutex emulated_casts;

extern "C" XLA_FFI_Error* EmulatedCast(XLA_FFI_CallFrame* frame) {
  const std::lock_guard lock(emulated_casts);
  return KvblockCast(frame);
}
