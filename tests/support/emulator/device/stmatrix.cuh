// stmatrix for the emulator: see cpp/device/stmatrix.cuh.
#pragma once

#include "cuda_runtime.h"

namespace kvblock {

inline char* RowOfMatrix(uint32_t address) {
  if (address % 16) emulator::Die("stmatrix writes rows that are not aligned");
  return emulator::SharedPointer(address);
}

inline void StoreMatrices(uint32_t address, const uint32_t (&r)[4]) {
  const auto shown = emulator::Show(address);
  const int lane = threadIdx.x % 32;
  for (int m = 0; m < 4; ++m) {
    char* const row = RowOfMatrix(shown[m * 8 + lane / 4][0]);
    std::memcpy(row + lane % 4 * 4, &r[m], 4);
  }
}

inline void StoreTransposes(uint32_t address, const uint32_t (&r)[4]) {
  const auto shown = emulator::Show(std::array<uint32_t, 5>{r[0], r[1], r[2], r[3], address});
  const int lane = threadIdx.x % 32, row = lane / 4;
  for (int m = 0; m < 4; ++m) {
    // A column of the matrix is a row now: two of its elements, which two lanes have.
    const auto element = [&](int of_row) {
      return shown[of_row * 4 + row / 2][m] >> row % 2 * 16 & 0xffff;
    };
    const uint32_t pair = element(lane % 4 * 2) | element(lane % 4 * 2 + 1) << 16;
    std::memcpy(RowOfMatrix(shown[m * 8 + row][4]) + lane % 4 * 4, &pair, 4);
  }
}

}  // namespace kvblock
