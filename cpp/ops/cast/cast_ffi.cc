// cast, the middle floor: decode the buffers of one XLA call into a kvblock_cast, check that every
// buffer has the size that the call implies, and hand it to the launcher.
//
// Operands: the matrix [rows, columns] and the scale, one float32. Results: its codes, those of its
// transpose, and the largest size of each tile. Mirrors jax_kvblock/training/cuda.py.
#include "ops/cast/cast_ffi.h"

#include <cstdint>
#include <initializer_list>
#include <string>

#include "kvblock/cast.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

ffi::Error Invalid(const std::string& what) {
  return ffi::Error::InvalidArgument("kvblock_cast: " + what);
}

bool Has(const ffi::AnyBuffer& buffer, ffi::DataType type, std::initializer_list<int64_t> shape) {
  const auto dims = buffer.dimensions();
  return buffer.element_type() == type &&
         std::equal(shape.begin(), shape.end(), dims.begin(), dims.end());
}

ffi::Error Cast(void* stream, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> transposed,
                ffi::Result<ffi::AnyBuffer> largest) {
  kvblock_cast call{};
  switch (x.element_type()) {
    case ffi::DataType::BF16: call.dtype = KVBLOCK_CAST_BF16; break;
    case ffi::DataType::F16: call.dtype = KVBLOCK_CAST_F16; break;
    case ffi::DataType::F32: call.dtype = KVBLOCK_CAST_F32; break;
    default: return Invalid("the matrix must be bfloat16, float16 or float32");
  }
  const ffi::DataType format = out->element_type();
  switch (format) {
    case ffi::DataType::F8E4M3FN: call.format = KVBLOCK_CAST_E4M3; break;
    case ffi::DataType::F8E5M2: call.format = KVBLOCK_CAST_E5M2; break;
    default: return Invalid("codes must be float8_e4m3fn or float8_e5m2");
  }
  const auto dims = x.dimensions();
  if (dims.size() != 2) return Invalid("the matrix must be [rows, columns]");
  call.rows = dims[0];
  call.columns = dims[1];
  const auto tiles = [](int64_t size) {
    return (size + KVBLOCK_CAST_TILE - 1) / KVBLOCK_CAST_TILE;
  };
  if (!Has(scale, ffi::DataType::F32, {}) || !Has(*out, format, {call.rows, call.columns}) ||
      !Has(*transposed, format, {call.columns, call.rows}) ||
      !Has(*largest, ffi::DataType::F32, {tiles(call.rows), tiles(call.columns)})) {
    return Invalid("the scale, the codes or the sizes have another shape or dtype");
  }
  call.x = x.untyped_data();
  call.scale = static_cast<const float*>(scale.untyped_data());
  call.out = out->untyped_data();
  call.transposed = transposed->untyped_data();
  call.largest = static_cast<float*>(largest->untyped_data());
  const char* const message = kvblock_cast_cuda(&call, stream);
  return message == nullptr ? ffi::Error::Success() : Invalid(message);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvblockCast, Cast,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});
