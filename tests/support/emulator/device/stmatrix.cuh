// stmatrix for the emulator: see cpp/device/stmatrix.cuh.
#pragma once

#include "cuda_runtime.h"

namespace kvblock {

inline void StoreMatrices(uint32_t address, const uint32_t (&r)[4]) {
  const auto shown = emulator::Show(address);
  const int lane = threadIdx.x % 32;
  for (int m = 0; m < 4; ++m) {
    char* const row = emulator::SharedPointer(shown[m * 8 + lane / 4][0]);
    std::memcpy(row + lane % 4 * 4, &r[m], 4);
  }
}

}  // namespace kvblock
