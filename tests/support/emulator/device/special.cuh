// The special function unit, for the emulator.
#pragma once

#include "cuda_runtime.h"

namespace emulator {
inline int square_roots = 0;  // computed since somebody asked
}  // namespace emulator

namespace kvblock {

inline float Exp2(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }
inline float Log2(float x) { return std::log2(x); }
inline float Reciprocal(float x) { return 1.0f / x; }
inline float SquareRoot(float x) {
#if !KVBLOCK_CHECK_RACES
  ++emulator::square_roots;
#endif
  return std::sqrt(x);
}
inline float MaxOrNan(float a, float b) { return a != a || b != b ? NAN : max(a, b); }
inline int MaxOfBits(int m, float a, float b) {
  return max(max(m, __float_as_int(a)), __float_as_int(b));
}

}  // namespace kvblock
