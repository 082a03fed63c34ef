// cast, the middle floor: decode the buffers of one XLA call into a kvblock_cast, check that every
// buffer has the size that the call implies, and hand it to the launcher.
//
// Operands: the matrix [rows, columns] and the scale, one float32. Results: its codes, where the
// attribute `codes` is 1; those of its transpose, where `transposed` is; and the largest size of
// each tile. Mirrors jax_kvblock/training/cuda.py.
#include "ops/cast/cast_ffi.h"

#include <cstdint>
#include <string>

#include "kvblock/cast.h"
#include "ops/cast/cast_buffers.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using kvblock::Has;

namespace {

ffi::Error Invalid(const std::string& what) {
  return ffi::Error::InvalidArgument("kvblock_cast: " + what);
}

ffi::Error Cast(void* stream, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::RemainingRets rets,
                int32_t codes, int32_t transposed) {
  kvblock_cast call{};
  call.dtype = kvblock::CastDtype(x.element_type());
  if (call.dtype < 0) return Invalid("the matrix must be bfloat16, float16 or float32");
  const auto dims = x.dimensions();
  if (dims.size() != 2) return Invalid("the matrix must be [rows, columns]");
  const int64_t rows = dims[0], columns = dims[1];
  call.rows = rows;
  call.columns = columns;
  const bool wants_codes = codes != 0, wants_transposed = transposed != 0;
  if (rets.size() != size_t{wants_codes} + size_t{wants_transposed} + 1 || rets.size() == 1) {
    return Invalid("there must be as many results as the attributes say, and codes among them");
  }
  const auto result = [&](size_t i) { return **rets.get<ffi::AnyBuffer>(i); };
  const ffi::DataType format = result(0).element_type();
  call.format = kvblock::CastFormat(format);
  if (call.format < 0) return Invalid("codes must be float8_e4m3fn or float8_e5m2");
  const int64_t down = (rows + KVBLOCK_CAST_TILE_ROWS - 1) / KVBLOCK_CAST_TILE_ROWS;
  const int64_t across = (columns + KVBLOCK_CAST_TILE_COLUMNS - 1) / KVBLOCK_CAST_TILE_COLUMNS;
  bool fits = Has(scale, ffi::DataType::F32, {});
  size_t next = 0;
  if (wants_codes) {
    const ffi::AnyBuffer out = result(next++);
    fits = fits && Has(out, format, {rows, columns});
    call.out = out.untyped_data();
  }
  if (wants_transposed) {
    const ffi::AnyBuffer out = result(next++);
    fits = fits && Has(out, format, {columns, rows});
    call.transposed = out.untyped_data();
  }
  const ffi::AnyBuffer largest = result(next);
  fits = fits && Has(largest, ffi::DataType::F32, {down, across});
  if (!fits) return Invalid("the scale, the codes or the sizes have another shape or dtype");
  call.x = x.untyped_data();
  call.scale = static_cast<const float*>(scale.untyped_data());
  call.largest = static_cast<float*>(largest.untyped_data());
  const char* const message = kvblock_cast_cuda(&call, stream);
  return message == nullptr ? ffi::Error::Success() : Invalid(message);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvblockCast, Cast,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<int32_t>("codes")
                                  .Attr<int32_t>("transposed"),
                              {ffi::Traits::kCmdBufferCompatible});
