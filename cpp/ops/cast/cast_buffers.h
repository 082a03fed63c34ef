// Buffers of XLA calls as kvblock/cast.h knows them.
#ifndef KVBLOCK_OPS_CAST_BUFFERS_H_
#define KVBLOCK_OPS_CAST_BUFFERS_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "kvblock/cast.h"
#include "xla/ffi/api/ffi.h"

namespace kvblock {

inline bool Has(const xla::ffi::AnyBuffer& buffer, xla::ffi::DataType type,
                std::initializer_list<int64_t> shape) {
  const auto dims = buffer.dimensions();
  return buffer.element_type() == type &&
         std::equal(shape.begin(), shape.end(), dims.begin(), dims.end());
}

// A kvblock_cast_dtype; -1 for what is none.
inline int32_t CastDtype(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::DataType::BF16: return KVBLOCK_CAST_BF16;
    case xla::ffi::DataType::F16: return KVBLOCK_CAST_F16;
    case xla::ffi::DataType::F32: return KVBLOCK_CAST_F32;
    default: return -1;
  }
}

// A kvblock_cast_format; -1 for what is none.
inline int32_t CastFormat(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::DataType::F8E4M3FN: return KVBLOCK_CAST_E4M3;
    case xla::ffi::DataType::F8E5M2: return KVBLOCK_CAST_E5M2;
    default: return -1;
  }
}

}  // namespace kvblock

#endif  // KVBLOCK_OPS_CAST_BUFFERS_H_
