// Results that are the first operands, in place. The other operands are what has to be there
// before: XLA puts this call, and so all that reads its results, behind what makes them.
#include "ops/after/after_ffi.h"

#include <cstdint>

#include "kvblock/block_copy.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

ffi::Error After(void* stream, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  for (size_t i = 0; i < results.size(); ++i) {
    const auto from = operands.get<ffi::AnyBuffer>(i);
    auto to = results.get<ffi::AnyBuffer>(i);
    if (!from.has_value()) return from.error();
    if (!to.has_value()) return to.error();
    void* const data = (*to)->untyped_data();
    const auto bytes = static_cast<int64_t>((*to)->size_bytes());
    if (bytes != static_cast<int64_t>(from->size_bytes())) {
      return ffi::Error::InvalidArgument("after: a result has another size than its operand");
    }
    // Where XLA gives a result other memory all the same, it is a copy.
    if (data == from->untyped_data()) continue;
    if (const char* error = kvblock_copy_bytes_cuda(data, from->untyped_data(), bytes, stream)) {
      return ffi::Error::InvalidArgument(error);
    }
  }
  return ffi::Error::Success();
}

}  // namespace

// Not for command buffers: there is nothing to record.
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    KvblockAfter, After,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().RemainingArgs().RemainingRets());
