// The FFI handlers of attention as XLA's CPU calls them: what they launch runs on the emulator.
#include <mutex>

#include "no_stream.h"
//
#include "ops/attention/attention_ffi.cc"

namespace {

// One after the other, whatever threads XLA calls them from.
XLA_FFI_Error* Alone(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*), XLA_FFI_CallFrame* frame) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return handler(frame);
}

}  // namespace

extern "C" {
XLA_FFI_Error* Emulated_forward(XLA_FFI_CallFrame* frame) {
  return Alone(KvblockAttentionForward, frame);
}
XLA_FFI_Error* Emulated_backward_kv(XLA_FFI_CallFrame* frame) {
  return Alone(KvblockAttentionBackwardKv, frame);
}
XLA_FFI_Error* Emulated_backward_q(XLA_FFI_CallFrame* frame) {
  return Alone(KvblockAttentionBackwardQ, frame);
}
XLA_FFI_Error* Emulated_backward_bias(XLA_FFI_CallFrame* frame) {
  return Alone(KvblockAttentionBackwardBias, frame);
}
}
