// The FFI handlers that choose tiles as XLA's CPU calls them: what they launch runs on the
// emulator.
#include <mutex>

#include "no_stream.h"
//
#include "ops/select/select_ffi.cc"

// One after the other, whatever threads XLA calls them from.
static std::mutex emulated_selects;

extern "C" XLA_FFI_Error* EmulatedPoolPieces(XLA_FFI_CallFrame* frame) {
  const std::lock_guard lock(emulated_selects);
  return KvblockPoolPieces(frame);
}

extern "C" XLA_FFI_Error* EmulatedWeighTiles(XLA_FFI_CallFrame* frame) {
  const std::lock_guard lock(emulated_selects);
  return KvblockWeighTiles(frame);
}

extern "C" XLA_FFI_Error* EmulatedKeepTiles(XLA_FFI_CallFrame* frame) {
  const std::lock_guard lock(emulated_selects);
  return KvblockKeepTiles(frame);
}

extern "C" XLA_FFI_Error* EmulatedListTiles(XLA_FFI_CallFrame* frame) {
  const std::lock_guard lock(emulated_selects);
  return KvblockListTiles(frame);
}
