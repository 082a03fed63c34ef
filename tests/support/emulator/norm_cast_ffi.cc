// The FFI handler of norms in 8 bits as XLA's CPU calls it: what it launches runs on the emulator.
#include <mutex>

#include "no_stream.h"
//
#include "ops/cast/norm_cast_ffi.cc"

extern std::mutex emulated_casts;  // cast_ffi.cc's

extern "C" XLA_FFI_Error* EmulatedNormCast(XLA_FFI_CallFrame* frame) {
  const std::lock_guard lock(emulated_casts);
  return KvblockNormCast(frame);
}
