// norm_cast, the middle floor: decode the buffers of one XLA call into a kvblock_norm_cast, check
// that every buffer has the size that the call implies, and hand it to the launcher.
//
// Operands: the matrix [rows, columns], gamma, the scale, one float32, and a residual or none.
// Results: codes, where the attribute `codes` is 1; those of the transpose, where `transposed` is;
// the largest size of each tile; 1 / rms of each row; and with a residual the sum. Mirrors
// jax_kvblock/training/cuda.py.
#include <cstdint>
#include <initializer_list>
#include <string>

#include "kvblock/norm_cast.h"
#include "ops/cast/cast_buffers.h"
#include "ops/cast/cast_ffi.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using kvblock::Has;

namespace {

ffi::Error Invalid(const std::string& what) {
  return ffi::Error::InvalidArgument("kvblock_norm_cast: " + what);
}

ffi::Error NormCast(void* stream, ffi::AnyBuffer x, ffi::AnyBuffer gamma, ffi::AnyBuffer scale,
                    ffi::RemainingArgs residuals, ffi::RemainingRets rets, int32_t codes,
                    int32_t transposed, float eps) {
  kvblock_norm_cast call{};
  call.eps = eps;
  call.dtype = kvblock::CastDtype(x.element_type());
  if (call.dtype < 0) return Invalid("the matrix must be bfloat16, float16 or float32");
  call.gamma_dtype = kvblock::CastDtype(gamma.element_type());
  const auto dims = x.dimensions();
  if (dims.size() != 2) return Invalid("the matrix must be [rows, columns]");
  const int64_t rows = dims[0], columns = dims[1];
  call.rows = rows;
  call.columns = columns;
  const size_t orders = size_t{codes != 0} + size_t{transposed != 0};
  if (residuals.size() > 1 || rets.size() != orders + 2 + residuals.size() || orders == 0) {
    return Invalid("there must be as many results as the attributes say, and codes among them");
  }
  size_t next = 0;
  bool fits = true;
  const auto take = [&](ffi::DataType type, std::initializer_list<int64_t> shape) {
    const ffi::AnyBuffer buffer = **rets.get<ffi::AnyBuffer>(next++);
    fits = fits && Has(buffer, type, shape);
    return buffer.untyped_data();
  };
  const ffi::DataType format = (**rets.get<ffi::AnyBuffer>(0)).element_type();
  call.format = kvblock::CastFormat(format);
  if (call.format < 0) return Invalid("codes must be float8_e4m3fn or float8_e5m2");
  if (codes != 0) call.out = take(format, {rows, columns});
  if (transposed != 0) call.transposed = take(format, {columns, rows});
  const int64_t part = kvblock_norm_cast_part(columns);
  const int64_t tiles = (rows + KVBLOCK_NORM_CAST_ROWS - 1) / KVBLOCK_NORM_CAST_ROWS;
  void* const sizes = take(ffi::DataType::F32, {tiles, (columns + part - 1) / part});
  call.largest = static_cast<float*>(sizes);
  call.inverse_rms = static_cast<float*>(take(ffi::DataType::F32, {rows}));
  if (residuals.size() == 1) {
    const ffi::AnyBuffer residual = *residuals.get<ffi::AnyBuffer>(0);
    fits = fits && Has(residual, x.element_type(), {rows, columns});
    call.residual = residual.untyped_data();
    call.sum = take(x.element_type(), {rows, columns});
  }
  if (!fits || !Has(gamma, gamma.element_type(), {columns}) ||
      !Has(scale, ffi::DataType::F32, {})) {
    return Invalid("an array beside the matrix has another shape or dtype");
  }
  call.x = x.untyped_data();
  call.gamma = gamma.untyped_data();
  call.scale = static_cast<const float*>(scale.untyped_data());
  const char* const message = kvblock_norm_cast_cuda(&call, stream);
  return message == nullptr ? ffi::Error::Success() : Invalid(message);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvblockNormCast, NormCast,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int32_t>("codes")
                                  .Attr<int32_t>("transposed")
                                  .Attr<float>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});
