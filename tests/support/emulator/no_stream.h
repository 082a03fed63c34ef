// An FFI handler for a GPU as the CPU of XLA calls it: it asks for a stream, and a CPU has none.
// Included ahead of the source of the handler.
#ifndef KVBLOCK_EMULATOR_NO_STREAM_H_
#define KVBLOCK_EMULATOR_NO_STREAM_H_

#include <optional>

#include "xla/ffi/api/ffi.h"

namespace xla::ffi {

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

#endif  // KVBLOCK_EMULATOR_NO_STREAM_H_
