// What the launcher of norms in 8 bits checks before it launches.
#include <cmath>
#include <cstdint>
#include <string>

#include "host/message.h"
#include "kvblock/norm_cast.h"

namespace kvblock {
namespace {

std::string CheckNumbers(const kvblock_norm_cast& a) {
  if (a.dtype < KVBLOCK_CAST_BF16 || a.dtype > KVBLOCK_CAST_F32) {
    return Got("dtype must be KVBLOCK_CAST_BF16, F16 or F32", a.dtype);
  }
  if (a.gamma_dtype != a.dtype && a.gamma_dtype != KVBLOCK_CAST_F32) {
    return Got("gamma_dtype must be dtype or KVBLOCK_CAST_F32", a.gamma_dtype);
  }
  if (a.format != KVBLOCK_CAST_E4M3 && a.format != KVBLOCK_CAST_E5M2) {
    return Got("format must be KVBLOCK_CAST_E4M3 or E5M2", a.format);
  }
  if (!std::isfinite(a.eps) || a.eps < 0) return "eps must be finite and not negative";
  if (a.rows < 0 || a.rows > INT32_MAX || a.rows % 16 != 0) {
    return Got("rows must be a multiple of 16 from 0 to 2^31 - 1", a.rows);
  }
  const int64_t most = a.dtype == KVBLOCK_CAST_F32 ? 8192 : 16384;
  if (a.columns < 0 || a.columns > most || a.columns % 16 != 0) {
    return Got("columns must be a multiple of 16 from 0 to " + std::to_string(most) +
                   (most == 8192 ? ", to 16384 where dtype has 16 bits" : ""),
               a.columns);
  }
  return "";
}

// A matrix of nothing may have no address.
std::string CheckPointers(const kvblock_norm_cast& a) {
  if (a.rows == 0 || a.columns == 0) return "";
  if (a.x == nullptr) return "x is NULL";
  if (a.gamma == nullptr) return "gamma is NULL";
  if (a.scale == nullptr) return "scale is NULL";
  if (a.largest == nullptr) return "largest is NULL";
  if (a.residual != nullptr && a.sum == nullptr) return "sum is NULL, and there is a residual";
  if (a.residual == nullptr && a.sum != nullptr) {
    return "sum must be NULL where residual is: it would be x";
  }
  if (Misaligned({a.x, a.residual, a.gamma, a.sum, a.out, a.transposed}, 16)) {
    return "x, residual, gamma, sum, out and transposed must be aligned to 16 bytes";
  }
  if (Misaligned({a.scale, a.largest, a.inverse_rms}, 4)) {
    return "scale, largest and inverse_rms must be aligned to 4 bytes";
  }
  return "";
}

}  // namespace
}  // namespace kvblock

extern "C" int64_t kvblock_norm_cast_part(int64_t columns) {
  constexpr int64_t kParts = KVBLOCK_NORM_CAST_PARTS;
  const int64_t least = columns / kParts + (columns % kParts > 0 ? 1 : 0);
  int64_t part = KVBLOCK_NORM_CAST_COLUMNS;
  while (part < least) part *= 2;
  return part;
}

extern "C" const char* kvblock_norm_cast_check(const kvblock_norm_cast* a) {
  using namespace kvblock;
  if (a == nullptr) return Message("norm_cast: the struct is NULL");
  std::string error = CheckNumbers(*a);
  if (error.empty()) error = CheckPointers(*a);
  return error.empty() ? nullptr : Message("norm_cast: " + error);
}
