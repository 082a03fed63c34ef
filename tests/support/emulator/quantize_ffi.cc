// The FFI handler of quantization as XLA's CPU calls it: what it launches runs on the emulator.
#include <mutex>

#include "no_stream.h"
//
#include "ops/quantize/quantize_ffi.cc"

// One after the other, whatever threads XLA calls it from.
extern "C" XLA_FFI_Error* EmulatedQuantize(XLA_FFI_CallFrame* frame) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return KvblockQuantize(frame);
}
