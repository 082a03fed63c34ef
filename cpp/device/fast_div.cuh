// Dividing by what is known when a kernel is launched.
#pragma once

#include <cstdint>

namespace kvblock {

// n / d for n < 2^31 by multiply and shift (Granlund and Montgomery, 1994).
struct FastDiv {
  uint32_t d, multiplier, shift;

  FastDiv() = default;
  explicit FastDiv(uint32_t divisor) : d(divisor), shift(0) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    multiplier =
        static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d)) / d + 1);
  }
  __device__ uint32_t operator()(uint32_t n) const {
    return (__umulhi(n, multiplier) + n) >> shift;
  }
};

}  // namespace kvblock
