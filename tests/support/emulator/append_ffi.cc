// The FFI handler of the append as XLA's CPU calls it: what it launches runs on the emulator.
#include <mutex>
#include <optional>

#include "xla/ffi/api/ffi.h"

namespace xla::ffi {

// A CPU has no stream.
template <typename T>
struct NoStream {};
template <typename T>
struct CtxDecoding<NoStream<T>> {
  using Type = T;
  static std::optional<T> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine&) {
    return T{};
  }
};

}  // namespace xla::ffi

#define PlatformStream NoStream
#include "ops/append/append_ffi.cc"

// One after the other, whatever threads XLA calls it from.
extern "C" XLA_FFI_Error* EmulatedAppend(XLA_FFI_CallFrame* frame) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return KvblockAppend(frame);
}
