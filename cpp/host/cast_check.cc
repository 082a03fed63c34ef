// What the launcher of casts checks before it launches.
#include <cstdint>
#include <string>

#include "host/message.h"
#include "kvblock/cast.h"

namespace kvblock {
namespace {

std::string CheckNumbers(const kvblock_cast& a) {
  if (a.dtype < KVBLOCK_CAST_BF16 || a.dtype > KVBLOCK_CAST_F32) {
    return Got("dtype must be KVBLOCK_CAST_BF16, F16 or F32", a.dtype);
  }
  if (a.format != KVBLOCK_CAST_E4M3 && a.format != KVBLOCK_CAST_E5M2) {
    return Got("format must be KVBLOCK_CAST_E4M3 or E5M2", a.format);
  }
  const struct {
    const char* name;
    int64_t size;
  } axes[] = {{"rows", a.rows}, {"columns", a.columns}};
  for (const auto& axis : axes) {
    if (axis.size < 0 || axis.size > INT32_MAX || axis.size % 16 != 0) {
      return Got(std::string(axis.name) + " must be a multiple of 16 from 0 to 2^31 - 1",
                 axis.size);
    }
  }
  const int64_t down = (a.rows + KVBLOCK_CAST_TILE_ROWS - 1) / KVBLOCK_CAST_TILE_ROWS;
  const int64_t across = (a.columns + KVBLOCK_CAST_TILE_COLUMNS - 1) / KVBLOCK_CAST_TILE_COLUMNS;
  if (down * across > INT32_MAX) {
    return "there must be fewer than 2^31 tiles of 256 rows and 128 columns";
  }
  return "";
}

// A matrix of nothing may have no address.
std::string CheckPointers(const kvblock_cast& a) {
  if (a.rows == 0 || a.columns == 0) return "";
  if (a.x == nullptr) return "x is NULL";
  if (a.scale == nullptr) return "scale is NULL";
  if (a.largest == nullptr) return "largest is NULL";
  if (Misaligned({a.x, a.out, a.transposed}, 16)) {
    return "x, out and transposed must be aligned to 16 bytes";
  }
  if (Misaligned({a.scale, a.largest}, 4)) {
    return "scale and largest must be aligned to 4 bytes";
  }
  return "";
}

}  // namespace
}  // namespace kvblock

extern "C" const char* kvblock_cast_check(const kvblock_cast* a) {
  using namespace kvblock;
  if (a == nullptr) return Message("cast: the struct is NULL");
  std::string error = CheckNumbers(*a);
  if (error.empty()) error = CheckPointers(*a);
  return error.empty() ? nullptr : Message("cast: " + error);
}
