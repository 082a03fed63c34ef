// What the quantization launcher checks before it launches, and how much workspace it needs.
#include <cstdint>
#include <initializer_list>
#include <string>

#include "host/message.h"
#include "host/quantize_parts.h"
#include "kvblock/quantize.h"

namespace kvblock {
namespace {

// The product, or -1 where it is too large.
int64_t Times(std::initializer_list<int64_t> numbers) {
  int64_t product = 1;
  for (const int64_t number : numbers) {
    if (__builtin_mul_overflow(product, number, &product)) return -1;
  }
  return product;
}

std::string CheckSizes(const kvblock_quantize& call, const kvblock_quantize_array& a) {
  if (a.rows < 0 || a.rows > 1 << 30) return Got("rows must be 0 to 2^30", a.rows);
  if (a.heads < 1) return Got("heads must be positive", a.heads);
  if (a.dim < 16 || a.dim > KVBLOCK_QUANTIZE_MAX_DIM || a.dim % 16 != 0) {
    return Got("dim must be a multiple of 16 up to 128", a.dim);
  }
  if (a.shared < KVBLOCK_QUANTIZE_BLOCK || a.shared > KVBLOCK_QUANTIZE_TENSOR) {
    return Got("shared must be KVBLOCK_QUANTIZE_BLOCK, HEAD or TENSOR", a.shared);
  }
  if (a.turns != 0 && a.turns != 1) return Got("turns must be 0 or 1", a.turns);
  if (a.integers != 0 && a.integers != 1) return Got("integers must be 0 or 1", a.integers);
  const int64_t ctas = Times({call.batch, a.heads, QuantizeBlockCount(a)});
  if (ctas < 0 || ctas > INT32_MAX) {
    return "there must be fewer than 2^31 blocks of " + std::to_string(KVBLOCK_QUANTIZE_ROWS) +
           " rows";
  }
  if (a.shared == KVBLOCK_QUANTIZE_TENSOR && a.heads > INT32_MAX / kMostQuantizeParts) {
    return Got("heads that share a scale must be fewer than 2^26", a.heads);
  }
  return "";
}

std::string CheckStrides(const kvblock_quantize& call, const kvblock_quantize_array& a) {
  const struct {
    const char* name;
    int64_t stride, multiple, count;
  } axes[] = {
      {"batch_stride", a.batch_stride, 16, call.batch},
      {"row_stride", a.row_stride, 16, a.rows},
      {"head_stride", a.head_stride, 16, a.heads},
      {"out_batch_stride", a.out_batch_stride, 8, call.batch},
      {"out_row_stride", a.out_row_stride, 8, a.rows},
      {"out_head_stride", a.out_head_stride, 8, a.heads},
  };
  if (a.row_stride > UINT32_MAX) return Got("row_stride must be below 2^32", a.row_stride);
  if (a.out_row_stride > UINT32_MAX) {
    return Got("out_row_stride must be below 2^32", a.out_row_stride);
  }
  int64_t reach[2] = {0, 0};
  for (const auto& axis : axes) {
    int64_t far;
    int64_t& end = reach[axis.multiple == 8];
    if (axis.stride < 0) return Got(std::string(axis.name) + " must not be negative", axis.stride);
    if (axis.stride % axis.multiple != 0) {
      return Got(std::string(axis.name) + " must be a multiple of " + std::to_string(axis.multiple),
                 axis.stride);
    }
    // Rows from the end of an array to that of its last block are named, though never touched.
    if (__builtin_mul_overflow(axis.stride, axis.count + KVBLOCK_QUANTIZE_ROWS, &far) ||
        __builtin_add_overflow(end, far, &end)) {
      return Got(std::string(axis.name) + " is too large to address", axis.stride);
    }
  }
  return "";
}

// Arrays without elements may have no address.
std::string CheckPointers(const kvblock_quantize& call, const kvblock_quantize_array& a) {
  if (call.batch == 0) return "";
  if (a.scales == nullptr) return "scales is NULL";
  if (a.rows > 0 && a.x == nullptr) return "x is NULL";
  if (a.rows > 0 && a.out == nullptr) return "out is NULL";
  if (Misaligned({a.x}, 16)) return "x must be aligned to 16 bytes";
  if (Misaligned({a.out}, 8)) return "out must be aligned to 8 bytes";
  if (Misaligned({a.scales, a.mean, a.lens}, 4)) {
    return "scales, mean and lens must be aligned to 4 bytes";
  }
  return "";
}

std::string CheckNumbers(const kvblock_quantize& call) {
  if (call.dtype != KVBLOCK_QUANTIZE_BF16 && call.dtype != KVBLOCK_QUANTIZE_F16) {
    return Got("dtype must be KVBLOCK_QUANTIZE_BF16 or F16", call.dtype);
  }
  if (call.num_arrays < 1 || call.num_arrays > KVBLOCK_QUANTIZE_MAX_ARRAYS) {
    return Got("num_arrays must be 1 to 4", call.num_arrays);
  }
  if (call.batch < 0 || call.batch > INT32_MAX) {
    return Got("batch must be 0 to 2^31 - 1", call.batch);
  }
  int64_t ctas = 0;
  for (int i = 0; i < call.num_arrays; ++i) {
    const kvblock_quantize_array& a = call.arrays[i];
    std::string error = CheckSizes(call, a);
    if (error.empty()) error = CheckStrides(call, a);
    if (!error.empty()) return "array " + std::to_string(i) + ": " + error;
    ctas += call.batch * a.heads * QuantizeBlockCount(a);
  }
  if (ctas > INT32_MAX) return Got("all arrays must have fewer than 2^31 blocks of rows", ctas);
  return "";
}

int64_t WorkspaceOf(const kvblock_quantize& call) {
  int64_t numbers = 0;
  for (int i = 0; i < call.num_arrays; ++i) {
    const kvblock_quantize_array& a = call.arrays[i];
    numbers += QuantizeSumCount(call, a) * (a.turns ? 2 : 1) + QuantizeLargestCount(call, a);
  }
  return numbers * int64_t{sizeof(float)};
}

}  // namespace
}  // namespace kvblock

extern "C" int64_t kvblock_quantize_workspace(const kvblock_quantize* a) {
  using namespace kvblock;
  return a == nullptr || !CheckNumbers(*a).empty() ? -1 : WorkspaceOf(*a);
}

extern "C" const char* kvblock_quantize_check(const kvblock_quantize* a) {
  using namespace kvblock;
  if (a == nullptr) return Message("quantize: the struct is NULL");
  std::string error = CheckNumbers(*a);
  for (int i = 0; i < a->num_arrays && error.empty(); ++i) {
    error = CheckPointers(*a, a->arrays[i]);
    if (!error.empty()) error = "array " + std::to_string(i) + ": " + error;
  }
  if (error.empty()) {
    const int64_t needed = WorkspaceOf(*a);
    if (a->workspace_bytes < needed) {
      error = "workspace_bytes must be at least " + std::to_string(needed) + ", got " +
              std::to_string(a->workspace_bytes);
    } else if (needed > 0 && a->workspace == nullptr) {
      error = "workspace is NULL";
    } else if (Misaligned({a->workspace}, 4)) {
      error = "workspace must be aligned to 4 bytes";
    }
  }
  return error.empty() ? nullptr : Message("quantize: " + error);
}
